r"""Make source-target pairs for `finetune seq2seq`: summaries of articles, or questions from files in SQuAD format.

    hf-ctxmodels data pairs --kind summaries --dataset news.txt.gz --output_dir data/summaries
    hf-ctxmodels data pairs --kind questions --dataset xquad.en.json.gz --output_dir data/questions

Each part is written as a table (train.jsonl, validation.jsonl), and as two files of lines (train.source.txt,
train.target.txt, ...) for `train-tokenizer --translations` and `generate`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_directory, wrap_write_errors
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.downstream.tasks.question_answering import read_squad
from hf_ctxmodels.downstream.tasks.seq2seq_pairs import PairLimits, question_pairs, split_questions, summary_pairs
from hf_ctxmodels.training.recipe import parse_arguments

Pairs = list[tuple[str, str]]
PARTS = ("train", "validation")
FORMS = (".jsonl", ".source.txt", ".target.txt")


@dataclass
class PairArguments:
    """Input and output."""

    kind: Literal["summaries", "questions"] = field(
        metadata={
            "help": "summaries: the first sentence or title of an article from the rest of it; questions: a question "
            "from its answer and the sentence of the context that holds it."
        }
    )
    dataset: list[str] = field(
        metadata={"help": "summaries: articles, as --dataset of pretrain; questions: .json files in SQuAD format."}
    )
    output_dir: str = field(metadata={"help": "Output directory."})
    validation_fraction: float = flag(
        0.1, "Fraction of validation articles, the same as those of pretrain, or of validation contexts, the last ones."
    )
    min_target_words: int = flag(PairLimits.min_target, "Pairs with a shorter target are left out.")
    max_target_words: int = flag(PairLimits.max_target, "Pairs with a longer target are left out.")
    min_source_words: int = flag(PairLimits.min_source, "Summaries: pairs with a shorter source are left out.")
    max_source_words: int = flag(
        PairLimits.max_source,
        "Longest source in words; summaries are truncated at a sentence, questions with longer sources are left out.",
    )
    overwrite: bool = flag(False, "Replace the files in --output_dir.")

    @property
    def limits(self) -> PairLimits:
        """The lengths."""
        return PairLimits(self.min_target_words, self.max_target_words, self.min_source_words, self.max_source_words)


def make_pairs(arguments: PairArguments) -> tuple[Pairs, Pairs]:
    """The pairs for training and validation.

    Raises:
        CtxError: A file cannot be read, or a part has no pairs.
    """
    limits, fraction = arguments.limits, arguments.validation_fraction
    parts: Iterable[Pairs]
    if arguments.kind == "summaries":
        documents = load_documents(*arguments.dataset, skip_empty=True).split(fraction)
        parts = [list(summary_pairs(part, limits)) for part in documents]
    else:
        questions = [question for file in arguments.dataset for question in read_squad(file)]
        parts = [list(question_pairs(part, limits)) for part in split_questions(questions, fraction)]
    training, validation = parts
    if not training or not validation:
        raise CtxError(
            f"{len(training)} pairs for training and {len(validation)} for validation.",
            location=" ".join(arguments.dataset),
            hint="give more data, or other lengths: --min_source_words, --max_target_words, ...",
        )
    return training, validation


def write_pairs(directory: Path, part: str, pairs: Pairs) -> None:
    """Write the files of a part."""
    table = [json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs]
    for form, lines in zip(FORMS, (table, *zip(*pairs, strict=True)), strict=True):
        (directory / f"{part}{form}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Make and write pairs."""
    (arguments,) = parse_arguments(PairArguments, description=__doc__)
    names = [f"{part}{form}" for part in PARTS for form in FORMS]
    check_output_directory(arguments.output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    directory, parts = Path(arguments.output_dir), make_pairs(arguments)
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for part, pairs in zip(PARTS, parts, strict=True):
            write_pairs(directory, part, pairs)
    print(f"{len(parts[0])} pairs for training and {len(parts[1])} for validation in {directory}")
    for name, text in zip(("source", "target"), parts[1][0], strict=True):
        print(f"{name}: {text[:200]}")
