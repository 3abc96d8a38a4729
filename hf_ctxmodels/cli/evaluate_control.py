r"""Evaluate the control codes of a causal language model on held-out documents.

    hf-ctxmodels evaluate control --model runs/gpt2-codes --dataset reuters.txt speeches.txt \
        --control_codes Reuters Speeches --validation_fraction 0.1 --length 64

Texts are windows of --length tokens of the held-out documents. Printed are the perplexity with the right code, a wrong
code (geometric mean over the other codes) and no code; the accuracy of the attribution of each text to the code under
which it is most probable, with a baseline, naive Bayes over the tokens of the training documents; and, with
--generated_texts, how often a classifier recognizes the code of generated texts.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import set_seed as seed_generators

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.data.document_sources import DataArguments
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks.metrics import range_note
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceClassification, SequenceExample
from hf_ctxmodels.evaluation.control import (
    Attribution,
    UnigramClassifier,
    coded_texts,
    confusion_table,
    cut_windows,
    score_codes,
)
from hf_ctxmodels.inference import Predictor, generate_texts

_DATA_FLAGS = (
    *("dataset", "control_codes", "control_column", "document_separator", "text_column", "skip_empty_documents"),
    "validation_fraction",
)


@dataclass
class ControlEvaluationArguments:
    """Model and texts."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a model that was trained with control codes.")
    length: int = flag(64, "Tokens of a text, without its code.")
    texts_per_code: int = flag(500, "Use the first N texts of each code.")
    batch_size: int = flag(32, "Texts per batch.")
    generated_texts: int = flag(0, "Texts to generate for each code, by sampling; 0 for none.")
    top_p: float = flag(0.9, "Nucleus sampling of generated texts: cumulative probability of the tokens.")
    classifier: str | None = flag(
        None, "Text classifier with the codes as labels, for generated texts in addition to the baseline."
    )
    seed: int = flag(0, "Seed of generated texts.")

    def __post_init__(self) -> None:
        check_range(self, "length", "texts_per_code", "batch_size", at_least=1)
        check_range(self, "generated_texts", at_least=0)
        check_range(self, "top_p", above=0, at_most=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        if self.classifier is not None and not self.generated_texts:
            raise CtxError(
                "The classifier reads generated texts, and there are none.",
                location=f"--classifier {self.classifier}",
                hint="pass --generated_texts 100, for example, or omit --classifier.",
            )


def main() -> None:
    """Evaluate, and print the perplexities, the attribution, and the recognition of generated texts."""
    arguments, data, placement = parse_arguments(
        ControlEvaluationArguments, (DataArguments, _DATA_FLAGS), DeviceArguments, description=__doc__
    )
    if not data.control_codes and data.control_column is None:
        raise CtxError(
            "The documents have no control codes.",
            location="--dataset",
            hint="set one code for each --dataset with --control_codes, or --control_column.",
        )
    model, tokenizer = load_model_and_tokenizer(arguments.model, "AutoModelForCausalLM")
    placement.place(model)
    training, held_out = data.load()
    if held_out is None:
        print_status(
            "warning: --validation_fraction 0: all documents are scored, without a naive Bayes baseline; with the "
            "files of pretraining, these are training texts."
        )
    texts = cut_windows(coded_texts(tokenizer, held_out or training), arguments.length, arguments.texts_per_code)
    scores = score_codes(model, tokenizer, texts, batch_size=arguments.batch_size)
    unigrams = None
    if held_out is not None:
        unigrams = UnigramClassifier(coded_texts(tokenizer, training), scores.codes, len(tokenizer))
    perplexities = "  ".join(f"{name} {value:.3f}" for name, value in scores.perplexities().items())
    print(f"{len(texts):,} texts of {arguments.length} tokens, {len(scores.codes)} codes")
    print(f"perplexity per token, code: {perplexities}")
    attribution = scores.attribution()
    print(f"attribution: {_summary(attribution, None if unigrams is None else unigrams.attribution(texts))}")
    print("\n".join(confusion_table(attribution)))
    if arguments.generated_texts:
        print_generated(arguments, model, tokenizer, scores.codes, unigrams)
    print(range_note("perplexity", "accuracy"))


def print_generated(
    arguments: ControlEvaluationArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    codes: tuple[str, ...],
    unigrams: UnigramClassifier | None,
) -> None:
    """Print how often the baseline and the classifier recognize the code of generated texts."""
    seed_generators(arguments.seed)
    texts = [
        (code, text)
        for code in codes
        for text in generate_texts(
            model,
            tokenizer,
            [""] * arguments.generated_texts,
            control=code,
            max_new_tokens=arguments.length,
            batch_size=arguments.batch_size,
            do_sample=True,
            top_p=arguments.top_p,
            top_k=0,
        )
        if text
    ]
    print(f"{len(texts):,} texts were generated, {arguments.generated_texts} for each code")
    if unigrams is not None:
        encoded = tokenizer([text for _, text in texts], add_special_tokens=False)["input_ids"]
        coded = [(code, np.array(ids, dtype=np.int64)) for (code, _), ids in zip(texts, encoded, strict=True)]
        print(f"generated texts, naive Bayes: {_summary(unigrams.attribution(coded))}")
    if arguments.classifier is not None:
        predictor = Predictor.open(arguments.classifier, task=SequenceClassification.name)
        missing = sorted(set(codes) - set(map(str, predictor.model.config.id2label.values())))
        if missing:
            raise CtxError(
                f"The classifier has no label {missing[0]!r}.",
                location=f"--classifier {arguments.classifier}",
                hint="fine-tune a classifier whose labels are the codes.",
            )
        examples = [SequenceExample((text,), code, "generated") for code, text in texts]
        results = predictor.predict(examples, arguments.batch_size)
        labels = np.array([codes.index(code) for code, _ in texts])
        shares = np.array([[result["probabilities"][code] for code in codes] for result in results])
        print(f"generated texts, classifier: {_summary(Attribution.from_scores(codes, labels, shares))}")


def _summary(attribution: Attribution, baseline: Attribution | None = None) -> str:
    columns = [f"accuracy {attribution.accuracy:.4f}", f"chance {attribution.chance:.4f}"]
    return "  ".join(columns + ([] if baseline is None else [f"naive Bayes {baseline.accuracy:.4f}"]))
