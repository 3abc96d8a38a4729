r"""Evaluate on minimal pairs whether a language model prefers the acceptable sentence.

    hf-ctxmodels evaluate pairs --model runs/bert --pairs blimp/*.jsonl.gz --unigram_text news.txt.gz

The baseline is a unigram model of the tokens in --unigram_text, preferably the training text of the model: it ignores
the context.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.evaluation import MinimalPair, PairResult, evaluate_pairs, read_pairs, total_result, unigram_scorer
from hf_ctxmodels.inference import score
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments

LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForPreTraining")


@dataclass
class EvaluationArguments:
    """Model and minimal pairs."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a language model."})
    pairs: list[str] = field(
        metadata={"help": "JSONL files in the format of BLiMP, with sentence_good and sentence_bad."}
    )
    unigram_text: list[str] = field(metadata={"help": "Text files for the token frequencies of the unigram baseline."})
    max_pairs: int | None = flag(None, "Use the first N pairs of each file; by default all.")
    batch_size: int = flag(64, "Sequences per batch; a masked language model needs one per token.")


def language_model_class(config: PreTrainedConfig) -> str:
    """Name of the Auto class of a checkpoint's language model: the class that it was saved from, if possible.

    Raises:
        CtxError: The family has no language model.
    """
    family = get_family(config)
    auto_classes = [name for name in LANGUAGE_MODELS if name in family.models]
    saved_classes = {name.removeprefix("Ctx") for name in config.architectures or []}
    preferred = [name for name in auto_classes if family.models[name].__name__.removeprefix("Ctx") in saved_classes]
    if not auto_classes:
        raise CtxError(f"The family {family.name!r} has no language model.", hint="use a language model.")
    return (preferred or auto_classes)[0]


def result_lines(results: dict[str, PairResult], unigrams: dict[str, PairResult]) -> list[str]:
    """Format a line for each phenomenon and one for all."""
    rows = [(name, results[name], unigrams[name]) for name in results]
    rows.append(("all", total_result(results.values()), total_result(unigrams.values())))
    return [
        f"{name:<36} accuracy {result.accuracy:.4f}  unigram {unigram.accuracy:.4f}  "
        f"difference {result.accuracy - unigram.accuracy:+.4f}  {result.pairs} pairs"
        for name, result, unigram in rows
    ]


def main() -> None:
    """Evaluate and print."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    pairs: list[MinimalPair] = []
    for path in arguments.pairs:
        pairs += read_pairs(path)[: arguments.max_pairs]
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    check_tokenizer_matches_model(tokenizer, config, location=arguments.model)
    model = load_model_with_adapters(arguments.model, language_model_class(config), config)
    texts = (line for path in arguments.unigram_text for line in read_lines(Path(path)))
    unigrams = evaluate_pairs(pairs, unigram_scorer(tokenizer, texts))
    score_texts = partial(score, model, tokenizer, batch_size=arguments.batch_size)
    results = evaluate_pairs(
        pairs, lambda sentences: [text_score.log_probability for text_score in score_texts(sentences)]
    )
    print("\n".join(result_lines(results, unigrams)))
