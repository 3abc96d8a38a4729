"""Tools that encode sentences and that evaluate."""

import json
import math
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_ctxmodels.registry import FAMILIES

from .workplace import TEXTS, Workplace, assert_close, check

# What lm-eval is told beside the directory. The tokenizer of seqae ends every text with a mark, which would stand
# between a context and what is predicted.
DECODERS = {"gpt2": "", "ulmfit": "", "seqae": ",add_bos_token=False"}
TASK = """\
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.rsplit(' ', 1)[0]}}}}"
doc_to_target: "{{{{' ' + text.rsplit(' ', 1)[1]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""


@check("sentence-transformers", "sentence-transformers")
def sentence_transformers(place: Workplace) -> str:
    """A saved encoder with mean pooling: the vectors are the means of its states."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    directory = place.save(AutoModel)
    word = Transformer(directory)
    encoder = SentenceTransformer(modules=[word, Pooling(word.get_embedding_dimension())], device="cpu")
    vectors = torch.from_numpy(encoder.encode(TEXTS))
    batch = place.batch()
    with torch.no_grad():
        states = AutoModel.from_pretrained(directory).eval()(**batch).last_hidden_state
    tokens = batch["attention_mask"][..., None]
    assert_close(vectors, (states * tokens).sum(1) / tokens.sum(1))
    return ""


def save_decoder(place: Workplace, family: str) -> str:
    """The directory of a saved causal language model of a family, with its tokenizer."""
    spec = FAMILIES[family]
    tokenizer = spec.tokenizer.train(TEXTS * 3, vocab_size=300 if family == "gpt2" else 60)
    torch.manual_seed(0)
    config = spec.config(**{**spec.sizes["tiny"], "vocab_size": len(tokenizer), "initializer_range": 0.2})
    for part in (spec.models["AutoModelForCausalLM"](config), tokenizer):
        part.save_pretrained(place.folder / family)
    return str(place.folder / family)


def perplexity(directory: str, **options: Any) -> float:
    """Of the last word of each text after the others, by the model itself; the exponential of the mean per text."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    total = 0.0
    for text in TEXTS:
        context = len(tokenizer(text.rsplit(" ", 1)[0], **options)["input_ids"])
        ids = tokenizer(text, **options, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, context - 1 : -1]
        total += float(F.cross_entropy(scores.float(), ids[0, context:], reduction="sum"))
    return math.exp(total / len(TEXTS))


@check("lm-evaluation-harness", "lm-eval")
def lm_eval(place: Workplace) -> str:
    """Its `hf` model opens saved GPT-2, ULMFiT and seqae models without an import of this package; on a local task
    their perplexity is that of the models themselves."""
    task = place.folder / "task"
    task.mkdir(exist_ok=True)
    (task / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    (task / "local.yaml").write_text(TASK.format(rows=task / "rows.jsonl"), encoding="utf-8")
    for family, more in DECODERS.items():
        directory, results = save_decoder(place, family), place.folder / f"{family}-results"
        model = f"pretrained={directory},trust_remote_code=True,dtype=float32{more}"
        run = ("-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--include_path", str(task))
        options = ("--tasks", "local_text", "--device", "cpu", "--batch_size", "2", "--output_path", str(results))
        place.launch(*run, *options)
        (file,) = results.rglob("*.json")
        found = json.loads(file.read_text("utf-8"))["results"]["local_text"]["perplexity,none"]
        expected = perplexity(directory, **({"add_special_tokens": False} if more else {}))
        assert_close(torch.tensor(found), torch.tensor(expected), 1e-3)
    return "seqae: `add_bos_token=False`, since its tokenizer ends each text with a mark; XLNet predicts no next token"
