"""Compare two language models word by word: log-probabilities, ranks and their differences (LMdiff).

    hf-ctxmodels analyze compare --model runs/gpt2 runs/bert --text sentences.txt --output_dir analyses

Causal models predict words from the left context, masked models from both sides. The tokenizers may differ.
"""

from dataclasses import asdict, dataclass, replace

from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.analysis.word_comparison import TextComparison, WordScores, comparison_result, score_words
from hf_ctxmodels.cli.embed_sentences import iterate_sentences
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.evaluation.scoring import LikelihoodKind, likelihood_kind, load_language_model
from hf_ctxmodels.training.model_loading import check_sources


@dataclass
class ComparisonArguments(OutputArguments):
    """Models, text and output."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of two language models, with their tokenizers.")
    text: str = flag(REQUIRED, "File with a text per line or record: .txt, .jsonl or .parquet.")
    max_texts: int = flag(100, "Use the first N texts.")
    max_figures: int = flag(20, "Texts to show word by word: those with the largest differences.")
    batch_size: int = flag(32, "Sequences per batch; a masked model needs a sequence for every token.")

    def __post_init__(self) -> None:
        if len(self.model) != 2:
            raise CtxError(
                f"A comparison is of two models, not {len(self.model)}.", location="--model", hint="name two models."
            )
        check_range(self, "max_texts", "batch_size", at_least=1)
        check_range(self, "max_figures", at_least=0)


def main() -> None:
    """Score the texts under both models, and save tables and figures."""
    arguments, placement = parse_arguments(
        ComparisonArguments, DeviceArguments, description=__doc__, essential=("model", "text", "output_dir")
    )
    arguments.check_output("compare")
    check_sources(arguments.model)
    lines = iterate_sentences(arguments.text, "text")
    texts = [line for line, _ in zip(lines, range(arguments.max_texts)) if line.strip()]
    if not texts:
        raise CtxError("No text.", location=f"--text {arguments.text}", hint="use a file with a text per line.")
    names = short_names(arguments.model)
    kinds: list[LikelihoodKind] = []
    scores: list[list[WordScores | None]] = []
    for name, source in zip(names, arguments.model):
        model, tokenizer = load_language_model(source)
        placement.place(model)
        kinds.append(likelihood_kind(model, tokenizer))
        print_status(f"{name}: {type(model).__name__}, {kinds[-1]}")
        shown = progress_bar(texts, name, unit="texts")
        scores.append([score_words(model, tokenizer, text, batch_size=arguments.batch_size) for text in shown])
    pairs = zip(texts, *scores)
    comparisons = [TextComparison(text, (first, second)) for text, first, second in pairs if first and second]
    if len(comparisons) < len(texts):
        print_status(f"{len(texts) - len(comparisons)} of {len(texts)} texts are longer than a model: skipped")
    result = comparison_result(comparisons, names, kinds, max_figures=arguments.max_figures)
    settings = {**asdict(arguments), "texts": len(comparisons)}
    arguments.save(replace(result, models=arguments.model, settings=settings), num_printed=1)
