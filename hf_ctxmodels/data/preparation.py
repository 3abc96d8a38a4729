"""Preparation of examples: the parts of the text are tokenized independently, by several processes or jobs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import describe_differences, file_digest, read_json
from hf_ctxmodels.core.output_files import replacing, wrap_write_errors
from hf_ctxmodels.data.documents import Documents, NoDocumentError, SingleDocumentError
from hf_ctxmodels.data.examples import Example, ExampleBuilder, build_columns, no_examples_error
from hf_ctxmodels.data.prepared import (
    INDEX_FILE,
    SPLITS,
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    PartRecord,
    PreparedCorpus,
    PreparedFile,
    damaged_files,
    identity_digest,
    identity_file,
    part_file,
    record_file,
    write_examples,
    write_index,
    write_json,
)
from hf_ctxmodels.data.processes import map_in_processes

SENTENCES = "text_sentences"
"""Statistic of a source: number of sentences, from which it is sampled."""


@dataclass(frozen=True)
class TextPart:
    """Documents whose examples are made together.

    Attributes:
        source: Number of the dataset, with sampling by dataset; else 0.
        number: Number of the part within its source.
    """

    source: int
    number: int
    documents: Iterable[list[str]]

    def examples(self, objective: ExampleBuilder) -> Iterator[Example]:
        """The examples, none for a part without documents, or with a single document of several parts if the objective
        needs two; adds to the objective's statistics."""
        documents = self._counted(objective)
        is_one_of_several = isinstance(self.documents, Documents) and self.documents.may_be_empty
        with suppress(NoDocumentError, SingleDocumentError) if is_one_of_several else suppress(NoDocumentError):
            if (first := next(documents, None)) is None:
                return
            builder = objective.for_part(self.number)
            yield from builder.examples(chain([first], documents))
            if builder is not objective:
                objective.statistics.update(builder.statistics)

    def _counted(self, objective: ExampleBuilder) -> Iterator[list[str]]:
        for document in self.documents:
            objective.statistics[SENTENCES] += len(document)
            yield document


def text_parts(documents: Iterable[list[str]], objective: ExampleBuilder, source: int = 0) -> list[TextPart]:
    """The parts of a text: one if it is small, or the objective needs all of it."""
    divided = documents.parts() if isinstance(documents, Documents) and objective.is_divisible else [documents]
    return [TextPart(source, number, part) for number, part in enumerate(divided)]


def examples_of(parts: Sequence[TextPart], objective: ExampleBuilder) -> Iterator[Example]:
    """The examples of all parts, in order; raises NoDocumentError if there is no document."""
    before = objective.statistics[SENTENCES]
    for part in parts:
        yield from part.examples(objective)
    if objective.statistics[SENTENCES] == before:
        for part in parts:
            next(iter(part.documents), None)  # raises
        raise no_examples_error()


@dataclass(frozen=True)
class Preparation:
    """The examples of an objective, to be written into a directory.

    Attributes:
        identity: What the examples are made from, as JSON values.
        validation_fraction: Share of held-out documents, whose examples are a separate split.
    """

    parts: Sequence[TextPart]
    objective: ExampleBuilder
    tokenizer: PreTrainedTokenizerBase
    validation_fraction: float
    directory: Path
    identity: Mapping[str, Any]
    family: str | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of the identity, in the record of each part."""
        return identity_digest(self.identity)

    def run(self, numbers: Sequence[int] | None = None, num_proc: int = 1, show_progress: bool = False) -> None:
        """Write the parts of these numbers, by default all, except those that are complete.

        Raises:
            CtxError: The directory contains examples of other text or another objective, the text cannot be read, or a
                process was killed.
        """
        self._make_directory()
        numbers = range(len(self.parts)) if numbers is None else numbers
        missing = [number for number in numbers if self._complete_record(number) is None]
        if complete := len(numbers) - len(missing):
            print_status(f"{complete} of {len(numbers)} parts are complete", show_progress)
        if num_proc == 1 or len(missing) < 2:
            for number in progress_bar(missing, "preparing", unit="parts", enabled=show_progress):
                self.write_part(number)
            return
        hint = "run the same command again, with fewer processes; complete parts are not repeated."
        results = map_in_processes(self.write_part, missing, min(num_proc, len(missing)), hint=hint)
        for _ in progress_bar(results, "preparing", unit="parts", total=len(missing), enabled=show_progress):
            pass

    def _make_directory(self) -> None:
        """Create the directory and save the tokenizer; raises CtxError if the directory has other content."""
        if foreign := foreign_files(self.directory):
            raise CtxError(
                f"The directory contains other files: {', '.join(foreign[:3])}.",
                location=f"--output_dir {self.directory}",
                hint="use an empty directory.",
            )
        file = identity_file(self.directory)
        if file.is_file() and (differing := describe_differences(self.identity, read_json(file))):
            raise CtxError(
                f"The directory contains other examples: {'; '.join(differing)}.",
                location=f"--output_dir {self.directory}",
                hint="use another directory, or replace them with --overwrite.",
            )
        write_json(file, dict(self.identity))
        with wrap_write_errors(self.directory):
            for split in SPLITS:
                (self.directory / split).mkdir(exist_ok=True)
            self.tokenizer.save_pretrained(self.directory / TOKENIZER_FOLDER)

    def write_part(self, number: int) -> None:
        """Write the files and the record of a part, each atomically."""
        part = self.parts[number]
        splits = {TRAIN: part.documents}
        if self.validation_fraction and isinstance(part.documents, Documents):
            splits[TRAIN], splits[VALIDATION] = part.documents.split(self.validation_fraction)
        files, statistics, columns_of_splits = {}, {}, {}
        for split, documents in splits.items():
            before = Counter(self.objective.statistics)
            columns, length = build_columns(replace(part, documents=documents).examples(self.objective))
            if not length:
                continue
            file = part_file(self.directory, split, number)
            with replacing(file) as temporary:
                columns_of_splits = write_examples(temporary, columns, len(self.tokenizer))
                files[split] = PreparedFile(length, temporary.stat().st_size, file_digest(temporary))
            statistics[split] = dict(self.objective.statistics - before)
        record = PartRecord(self.digest, part.source, files, columns_of_splits, statistics)
        write_json(record_file(self.directory, number), asdict(record))

    def _complete_record(self, number: int) -> PartRecord | None:
        """The record of a part, or None if the part is missing or not complete."""
        file = record_file(self.directory, number)
        if not file.is_file():
            return None
        with suppress(CtxError):
            record = PartRecord.parse(read_json(file), str(file))
            if record.identity == self.digest and not damaged_files(self.directory, number, record):
                return record
        return None

    def merge(self, with_digests: bool = True) -> PreparedCorpus:
        """Check all parts, and write the index.

        Args:
            with_digests: Compare the content of all files with their digests.

        Raises:
            CtxError: A part is missing or damaged, or there is no example.
        """
        records = [self._complete_record(number) for number in range(len(self.parts))]
        missing = [number for number, record in enumerate(records) if record is None]
        if missing:
            names = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise CtxError(
                f"{len(missing)} of {len(records)} parts are missing or damaged: {names}.",
                location=str(self.directory),
                hint="run `hf-ctxmodels prepare` with the same flags but without --merge.",
            )
        complete = [record for record in records if record is not None]
        if with_digests:
            lines = [
                line
                for number, record in enumerate(complete)
                for line in damaged_files(self.directory, number, record, True)
            ]
            if lines:
                raise CtxError(
                    f"{'; '.join(lines[:3])}.",
                    location=str(self.directory),
                    hint="delete these files, and run `hf-ctxmodels prepare` with the same flags again.",
                )
        if not any(TRAIN in record.files for record in complete):
            raise no_examples_error()
        if self.validation_fraction and not any(VALIDATION in record.files for record in complete):
            raise NoDocumentError(
                "There is no held-out document with text.",
                location=f"--validation_fraction {self.validation_fraction}",
                hint="raise the fraction, or use more text.",
            )
        columns = next(record.columns for record in complete if record.columns)
        for number, record in enumerate(complete):
            if record.columns not in ({}, columns):
                raise CtxError(
                    f"The parts have different columns: {columns} and {record.columns}.",
                    location=str(record_file(self.directory, number)),
                    hint="make all parts with the same version of the package.",
                )
        corpus = PreparedCorpus(self.directory, self.identity, complete, self.family)
        with wrap_write_errors(self.directory):
            write_index(corpus)
        return corpus


_FILES = (
    *("parts/identity.json", "parts/part-*.json", f"{TOKENIZER_FOLDER}/*", INDEX_FILE, "dataset_dict.json"),
    *("*/part-*.arrow", "*/state.json", "*/dataset_info.json"),
)
_TEMPORARY = re.compile(r"\..*\.writing")


def foreign_files(directory: Path) -> list[str]:
    """Files that are not prepared examples, by their relative paths."""
    prepared = {path for pattern in _FILES for path in directory.glob(pattern)}
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and not _TEMPORARY.fullmatch(path.name))
    return [str(path.relative_to(directory)) for path in files if path not in prepared]


def delete_prepared(directory: Path) -> None:
    """Delete prepared examples, the index first, and no other files."""
    (directory / INDEX_FILE).unlink(missing_ok=True)
    for folder in (TOKENIZER_FOLDER, *SPLITS, "parts"):
        for path in (directory / folder).glob("*"):
            if any(path.match(pattern) for pattern in _FILES) or _TEMPORARY.fullmatch(path.name):
                path.unlink()
