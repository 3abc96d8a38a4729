r"""Test on minimal pairs whether a language model holds the acceptable sentence to be the likelier one.

    hf-ctxmodels evaluate pairs --model runs/bert --pairs blimp/*.jsonl.gz --unigram_text news.txt.gz

Accuracies stand beside those of the frequencies of the tokens in --unigram_text, best the text that the model learned
from: what a model has above them, it owes to context.
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
    """Model and pairs."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a language model."})
    pairs: list[str] = field(metadata={"help": "JSONL files with sentence_good and sentence_bad, as of BLiMP."})
    unigram_text: list[str] = field(metadata={"help": "Text files whose token frequencies are the baseline."})
    max_pairs: int | None = flag(None, "Use the first N pairs of each file; by default all.")
    batch_size: int = flag(64, "Sequences per batch; a masked language model needs one per token.")


def language_model_class(config: PreTrainedConfig) -> str:
    """The Auto class of a checkpoint's language model: the one it was saved from, if that is one.

    Raises:
        CtxError: The family has no language model.
    """
    family = get_family(config)
    known = [name for name in LANGUAGE_MODELS if name in family.models]
    saved = {name.removeprefix("Ctx") for name in config.architectures or []}
    of_saved = [name for name in known if family.models[name].__name__.removeprefix("Ctx") in saved]
    if not known:
        raise CtxError(f"The family {family.name!r} has no language model.", hint="give another model.")
    return (of_saved or known)[0]


def result_lines(found: dict[str, PairResult], unigrams: dict[str, PairResult]) -> list[str]:
    """What is printed: a line for each phenomenon, and one for all."""
    rows = [(name, found[name], unigrams[name]) for name in found]
    rows.append(("all", total_result(found.values()), total_result(unigrams.values())))
    return [
        f"{name:<36} accuracy {own.accuracy:.4f}  unigram {base.accuracy:.4f}  "
        f"difference {own.accuracy - base.accuracy:+.4f}  {own.pairs} pairs"
        for name, own, base in rows
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
    rate = partial(score, model, tokenizer, batch_size=arguments.batch_size)
    found = evaluate_pairs(pairs, lambda sentences: [each.log_probability for each in rate(sentences)])
    print("\n".join(result_lines(found, unigrams)))
