r"""Make source-target pairs for `finetune seq2seq`: summaries of articles, or questions from files in SQuAD format.

    hf-ctxmodels data pairs --kind summaries --dataset news.txt.gz --output_dir data/summaries
    hf-ctxmodels data pairs --kind questions --dataset xquad.en.json.gz --output_dir data/questions

Each split is written as a table (train.jsonl, validation.jsonl), and as two files of lines (train.source.txt,
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
SPLITS = ("train", "validation")
SUFFIXES = (".jsonl", ".source.txt", ".target.txt")


@dataclass
class PairArguments:
    """Input and output."""

    kind: Literal["summaries", "questions"] = field(
        metadata={
            "help": "summaries: the first sentence or title of an article from its other sentences; questions: a "
            "question from its answer and the sentence of the context that contains it."
        }
    )
    dataset: list[str] = field(
        metadata={"help": "summaries: articles, as --dataset of pretrain; questions: .json files in SQuAD format."}
    )
    output_dir: str = field(metadata={"help": "Output directory."})
    validation_fraction: float = flag(
        0.1,
        "Fraction of validation articles (the articles that pretrain holds out), or of validation contexts (the last).",
    )
    min_target_words: int = flag(
        PairLimits.min_target, "Shortest target in words; pairs with a shorter one are skipped."
    )
    max_target_words: int = flag(PairLimits.max_target, "Longest target in words; pairs with a longer one are skipped.")
    min_source_words: int = flag(
        PairLimits.min_source, "Shortest source of a summary in words; shorter ones are skipped."
    )
    max_source_words: int = flag(
        PairLimits.max_source,
        "Longest source in words; summaries are truncated at a sentence, longer questions are skipped.",
    )
    overwrite: bool = flag(False, "Replace the files in --output_dir.")

    @property
    def limits(self) -> PairLimits:
        """The length limits."""
        return PairLimits(self.min_target_words, self.max_target_words, self.min_source_words, self.max_source_words)


def make_pairs(arguments: PairArguments) -> tuple[Pairs, Pairs]:
    """Create the training and validation pairs.

    Raises:
        CtxError: A file cannot be read, or a split has no pairs.
    """
    limits, fraction = arguments.limits, arguments.validation_fraction
    splits: Iterable[Pairs]
    if arguments.kind == "summaries":
        documents = load_documents(*arguments.dataset, skip_empty=True).split(fraction)
        splits = [list(summary_pairs(articles, limits)) for articles in documents]
    else:
        questions = [question for file in arguments.dataset for question in read_squad(file)]
        splits = [list(question_pairs(split, limits)) for split in split_questions(questions, fraction)]
    training, validation = splits
    if not training or not validation:
        raise CtxError(
            f"{len(training)} pairs for training and {len(validation)} for validation.",
            location=" ".join(arguments.dataset),
            hint="use more data or other length limits: --min_source_words, --max_target_words, ...",
        )
    return training, validation


def write_pairs(directory: Path, split: str, pairs: Pairs) -> None:
    """Write the files of a split."""
    table = [json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs]
    for suffix, lines in zip(SUFFIXES, (table, *zip(*pairs, strict=True)), strict=True):
        (directory / f"{split}{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Make and write pairs."""
    (arguments,) = parse_arguments(PairArguments, description=__doc__)
    names = [f"{split}{suffix}" for split in SPLITS for suffix in SUFFIXES]
    check_output_directory(arguments.output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    directory, pairs_by_split = Path(arguments.output_dir), make_pairs(arguments)
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for split, pairs in zip(SPLITS, pairs_by_split, strict=True):
            write_pairs(directory, split, pairs)
    training, validation = pairs_by_split
    print(f"{len(training)} pairs for training and {len(validation)} for validation in {directory}")
    for name, text in zip(("source", "target"), validation[0], strict=True):
        print(f"{name}: {text[:200]}")
