"""Checks of sentence-transformers and of evaluation tools."""

import json
import math
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_ctxmodels.evaluation.scoring import load_language_model, score
from hf_ctxmodels.registry import FAMILIES

from .context import TEXTS, CheckContext, assert_close, check

# Additional arguments of lm-eval. The tokenizer of seqae appends an end token, which would separate the context from
# the continuation.
DECODERS = {"gpt2": "", "ulmfit": "", "seqae": ",add_bos_token=False"}
TASK = """\
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {examples}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.rsplit(' ', 1)[0]}}}}"
doc_to_target: "{{{{' ' + text.rsplit(' ', 1)[1]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""


@check("sentence-transformers", "sentence-transformers")
def sentence_transformers(context: CheckContext) -> str:
    """A saved encoder with mean pooling: embeddings equal the mean of the hidden states."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    directory = context.save(AutoModel)
    transformer = Transformer(directory)
    encoder = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")
    embeddings = torch.from_numpy(encoder.encode(TEXTS))
    batch = context.batch()
    with torch.no_grad():
        states = AutoModel.from_pretrained(directory).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    assert_close(embeddings, (states * mask).sum(1) / mask.sum(1))
    return "for T5, BART and MASS, pool the encoder: `modality_config` in the card of T5, or `CtxSentenceEncoder`"


@check("sentence-transformers, CrossEncoder", "sentence-transformers")
def cross_encoder(context: CheckContext) -> str:
    """A saved classifier, trained on text pairs, saved and reopened, with equal scores."""
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import CrossEntropyLoss

    encoder = CrossEncoder(context.save(AutoModelForSequenceClassification), device="cpu")
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    output = str(context.folder / "cross-encoder")
    options = CrossEncoderTrainingArguments(output_dir=output, max_steps=2, report_to="none", use_cpu=True)
    examples = Dataset.from_dict({"first": TEXTS, "second": TEXTS[::-1], "label": [0, 1, 0, 1]})
    CrossEncoderTrainer(model=encoder, args=options, train_dataset=examples, loss=CrossEntropyLoss(encoder)).train()
    encoder.save_pretrained(output)
    reloaded = CrossEncoder(output, device="cpu")
    assert_close(torch.from_numpy(reloaded.predict(pairs)), torch.from_numpy(encoder.predict(pairs)))
    return ""


@check("sentence-transformers, SparseEncoder", "sentence-transformers")
def sparse_encoder(context: CheckContext) -> str:
    """SPLADE with a saved masked language model: embeddings are the maxima of log(1 + relu(logits)) over the tokens."""
    from sentence_transformers import SparseEncoder

    directory, batch = context.save(AutoModelForMaskedLM), context.batch()
    embeddings = SparseEncoder(directory, device="cpu").encode(TEXTS).to_dense()
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(directory).eval()(**batch).logits
    assert_close(embeddings, (logits.relu().log1p() * batch["attention_mask"][..., None]).amax(1))
    return ""


def save_decoder(context: CheckContext, family: str) -> str:
    """Save a causal language model of a family with its tokenizer, and return the directory."""
    spec = FAMILIES[family]
    tokenizer = spec.tokenizer.train(TEXTS * 3, vocab_size=300 if family == "gpt2" else 60)
    torch.manual_seed(0)
    config = spec.config(**{**spec.sizes["tiny"], "vocab_size": len(tokenizer), "initializer_range": 0.2})
    spec.models["AutoModelForCausalLM"](config).save_pretrained(context.folder / family)
    tokenizer.save_pretrained(context.folder / family)
    return str(context.folder / family)


def perplexity(directory: str, **options: Any) -> float:
    """Perplexity of the last word of each text given the preceding words; the exponential of the mean over texts."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    total = 0.0
    for text in TEXTS:
        context_length = len(tokenizer(text.rsplit(" ", 1)[0], **options)["input_ids"])
        ids = tokenizer(text, **options, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, context_length - 1 : -1]
        total += float(F.cross_entropy(scores.float(), ids[0, context_length:], reduction="sum"))
    return math.exp(total / len(TEXTS))


@check("lm-evaluation-harness", "lm-eval")
def lm_eval(context: CheckContext) -> str:
    """The `hf` model loads saved GPT-2, ULMFiT and seqae models without an import of this package; the perplexity on a
    local task equals the perplexity computed by the model."""
    task = context.folder / "task"
    task.mkdir(exist_ok=True)
    (task / "examples.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    (task / "local.yaml").write_text(TASK.format(examples=task / "examples.jsonl"), encoding="utf-8")
    for family, extra_arguments in DECODERS.items():
        directory, results = save_decoder(context, family), context.folder / f"{family}-results"
        model = f"pretrained={directory},trust_remote_code=True,dtype=float32{extra_arguments}"
        run = ("-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--include_path", str(task))
        options = ("--tasks", "local_text", "--device", "cpu", "--batch_size", "2", "--output_path", str(results))
        context.launch(*run, *options)
        (file,) = results.rglob("*.json")
        reported = json.loads(file.read_text("utf-8"))["results"]["local_text"]["perplexity,none"]
        expected = perplexity(directory, **({"add_special_tokens": False} if extra_arguments else {}))
        assert_close(torch.tensor(reported), torch.tensor(expected), 1e-3)
    return "seqae needs `add_bos_token=False`, since its tokenizer appends an end token; XLNet has no next-token head"


@check("minicons", "minicons")
def minicons(context: CheckContext) -> str:
    """Log-likelihoods of GPT-2 and pseudo-log-likelihoods of BERT equal those of `score`, which `hf-ctxmodels evaluate
    pairs` uses."""
    from minicons.scorer import IncrementalLMScorer, MaskedLMScorer

    causal, masked = save_decoder(context, "gpt2"), context.save(AutoModelForMaskedLM)
    causal_scorer, masked_scorer = IncrementalLMScorer(causal, "cpu"), MaskedLMScorer(masked, "cpu")
    options = {"reduction": lambda scores: scores.sum().item()}
    results = {
        causal: causal_scorer.sequence_score(TEXTS, bos_token=True, **options),
        masked: masked_scorer.sequence_score(masked_scorer.tokenizer(TEXTS, padding=True), **options),
    }
    for directory, reported in results.items():
        expected = [text_score.log_probability for text_score in score(*load_language_model(directory), TEXTS)]
        assert_close(torch.tensor(reported), torch.tensor(expected))
    return "pass `MaskedLMScorer` tokenized texts: it calls a method that tokenizers of transformers 5 do not have"


@check("bert-score", "bert-score")
def bert_score(context: CheckContext) -> str:
    """Precision and recall with the states of the first layer equal the mean maxima of their cosines."""
    from bert_score import BERTScorer

    directory, references = context.save(AutoModel), TEXTS[::-1]
    precision, recall, _ = BERTScorer(directory, num_layers=1, device="cpu").score(TEXTS, references)
    model = AutoModel.from_pretrained(directory).eval()
    for index, texts in enumerate(zip(TEXTS, references, strict=True)):
        with torch.no_grad():
            states = [model(**context.batch([text]), output_hidden_states=True).hidden_states[1][0] for text in texts]
        cosines = F.cosine_similarity(states[0][:, None], states[1][None], dim=-1)
        assert_close(precision[index], cosines.amax(1)[1:-1].mean())  # without special tokens
        assert_close(recall[index], cosines.amax(0)[1:-1].mean())
    return "the number of layers must be given; a model of character ids (ELMo, CVT) has no token to compare"
