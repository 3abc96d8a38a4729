r"""Write a file of phrases and entities, one per line, for objectives that mask units.

hf-ctxmodels data units --dataset books.txt --output phrases.txt
hf-ctxmodels data units --entities train.conll --gazetteers names.txt phrases.txt --output entities.txt
hf-ctxmodels pretrain --recipe ernie_learning_2 --objective unit-mlm+pairs:units=phrases.txt ...
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_file, wrap_write_errors
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.data.phrase_mining import extract_entities, find_phrases
from hf_ctxmodels.data.table_files import read_conll
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class UnitArguments:
    """Input and output."""

    output: str = field(metadata={"help": "File to write, with one unit per line, the most frequent first."})
    dataset: list[str] = flag((), "Text to find phrases in by mutual information, as --dataset of pretrain.")
    validation_fraction: float = flag(
        0.0, "Fraction of held-out documents to skip; pretrain holds out the same documents."
    )
    gazetteers: list[str] = flag((), "Lists of phrases or entities, one per line; single words are skipped.")
    entities: list[str] = flag((), "CoNLL files with entities as BIO or IOB1 tags in the last column.")
    min_count: int = flag(20, "Minimum number of occurrences of a phrase.")
    min_information: float = flag(3.0, "Minimum pointwise mutual information of a phrase, in nats.")
    max_words: int = flag(4, "Longest phrase in words.")
    overwrite: bool = flag(False, "Replace --output if it exists.")


def main() -> None:
    """Find and write units."""
    (arguments,) = parse_arguments(UnitArguments, description=__doc__)
    inputs = (*arguments.dataset, *arguments.gazetteers, *arguments.entities)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=inputs)
    units = find_units(arguments)
    with wrap_write_errors(arguments.output):
        Path(arguments.output).write_text("".join(f"{unit}\n" for unit, _ in units.most_common()), encoding="utf-8")
    print(f"{len(units)} units in {arguments.output}, such as: {', '.join(unit for unit, _ in units.most_common(8))}")


def find_units(arguments: UnitArguments) -> Counter[str]:
    """Collect the units of all sources with their frequencies.

    Raises:
        CtxError: There are no sources or no units.
    """
    units = Counter[str]()
    if arguments.dataset:
        documents = load_documents(*arguments.dataset, skip_empty=True)
        if arguments.validation_fraction:
            documents, _ = documents.split(arguments.validation_fraction)
        limits = ("min_count", "min_information", "max_words")
        phrases = find_phrases(documents, **{name: getattr(arguments, name) for name in limits})
        print_status(f"{len(phrases)} phrases in {documents.name}")
        units.update(phrases)
    for file in arguments.gazetteers:
        units.update(" ".join(line.split()) for line in read_lines(Path(file)) if len(line.split()) > 1)
    for file in arguments.entities:
        units.update(extract_entities(read_conll(file)))
    if not units:
        raise CtxError(
            "There is no unit of two or more words.",
            hint="pass --dataset, --gazetteers or --entities, or lower --min_count and --min_information.",
        )
    return units
