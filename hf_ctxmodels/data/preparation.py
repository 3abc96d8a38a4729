"""Preparation of examples: the parts of the text are tokenized independently, by several processes or jobs."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import describe_differences, file_digest, read_json
from hf_ctxmodels.core.output_files import replacing, wrap_write_errors
from hf_ctxmodels.data.documents import Documents, NoDocumentError, SingleDocumentError, single_document_error
from hf_ctxmodels.data.examples import Example, ExampleBuilder, build_columns, no_examples_error
from hf_ctxmodels.data.folders import PARALLEL_READS, LocalFolder, RemoteFolder
from hf_ctxmodels.data.prepared import (
    IDENTITY_FILE,
    INDEX_FILE,
    SPLITS,
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    PartRecord,
    PreparedCorpus,
    PreparedFile,
    damaged_files_error,
    identity_digest,
    part_name,
    record_name,
    write_examples,
    write_index,
    write_json,
)
from hf_ctxmodels.data.processes import map_in_processes

SENTENCES = "text_sentences"
"""Statistic of a source: number of sentences, from which it is sampled."""

SINGLE_DOCUMENT_PARTS = "single_document_parts"
"""Statistic: number of parts without examples, because the objective needs two documents."""


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
        with suppress(NoDocumentError):
            if (first := next(documents, None)) is None:
                return
            builder = objective.for_part(self.number)
            try:
                yield from builder.examples(chain([first], documents))
            except SingleDocumentError:
                if not is_one_of_several:
                    raise
                objective.statistics[SINGLE_DOCUMENT_PARTS] += 1
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
    """The examples of all parts, in order; raises NoDocumentError if there is no document, and SingleDocumentError if
    the objective needs two documents, and each part has one."""
    before, is_empty = Counter(objective.statistics), True
    for part in parts:
        for example in part.examples(objective):
            is_empty = False
            yield example
    counts = objective.statistics - before
    if is_empty and counts[SINGLE_DOCUMENT_PARTS]:
        raise single_document_error(in_each_part=True)
    if not counts[SENTENCES]:
        for part in parts:
            next(iter(part.documents), None)  # raises
        raise no_examples_error()


@contextmanager
def held_out_errors() -> Iterator[None]:
    """Name the held-out documents in errors that no document causes, such as one document for an objective of pairs."""
    try:
        yield
    except CtxError as error:
        if error.location is not None:
            raise
        hint = f"raise --validation_fraction, or: {error.hint}"
        raise CtxError(error.message, location="the held-out documents", hint=hint) from error


@dataclass(frozen=True)
class Preparation:
    """The examples of an objective, to be written into a directory.

    Attributes:
        identity: What the examples are made from, as JSON values.
        validation_fraction: Share of held-out documents, whose examples are a separate split.
        directory: Local directory in which files are written.
        url: URL of a folder to which the files are moved: those of a part before its record, the index after all other
            files. None if they remain in the directory.
    """

    parts: Sequence[TextPart]
    objective: ExampleBuilder
    tokenizer: PreTrainedTokenizerBase
    validation_fraction: float
    directory: Path
    identity: Mapping[str, Any]
    family: str | None = None
    url: str | None = None

    @property
    def folder(self) -> LocalFolder:
        """The folder of the complete files."""
        return LocalFolder(self.directory) if self.url is None else RemoteFolder(self.directory, self.url)

    def part_digest(self, number: int) -> str:
        """Digest of the identity and the number of a part, in its record: a copy under another number is not valid."""
        return identity_digest({**self.identity, "part": number})

    def run(self, numbers: Sequence[int] | None = None, num_proc: int = 1, show_progress: bool = False) -> None:
        """Write the parts of these numbers, by default all, except those that are complete.

        Raises:
            CtxError: The directory contains examples of other text or another objective, the text cannot be read, a
                file cannot be uploaded, or a process was killed.
        """
        self._make_directory()
        numbers = range(len(self.parts)) if numbers is None else numbers
        records = self._complete_records(numbers)
        missing = [number for number, record in zip(numbers, records, strict=True) if record is None]
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
        self._check_identity(self._files())
        write_json(self.directory / IDENTITY_FILE, dict(self.identity))
        with wrap_write_errors(self.directory):
            for split in SPLITS:
                (self.directory / split).mkdir(exist_ok=True)
            self.tokenizer.save_pretrained(self.directory / TOKENIZER_FOLDER)
        tokenizer_files = sorted((self.directory / TOKENIZER_FOLDER).iterdir())
        self.folder.upload([IDENTITY_FILE, *(f"{TOKENIZER_FOLDER}/{path.name}" for path in tokenizer_files)])

    def _files(self) -> list[str]:
        """The files in the folder; raises CtxError if one of them is not of prepared examples."""
        names = list(self.folder.sizes())
        if foreign := [name for name in names if not _FILES.fullmatch(name)]:
            raise CtxError(
                f"The directory contains other files: {', '.join(foreign[:3])}.",
                location=f"--output_dir {self.folder}",
                hint="use an empty directory.",
            )
        return names

    def delete(self) -> None:
        """Delete prepared examples, the index first; raises CtxError if there are other files."""
        self.folder.delete(sorted(self._files(), key=lambda name: name != INDEX_FILE))

    def _check_identity(self, names: Collection[str]) -> None:
        """Raise CtxError if the folder, with files of these names, has examples of other text, another objective or
        another tokenizer."""
        if IDENTITY_FILE not in names:
            return
        self.folder.download([IDENTITY_FILE])
        if differing := describe_differences(self.identity, read_json(self.directory / IDENTITY_FILE)):
            raise CtxError(
                f"The directory contains other examples: {'; '.join(differing)}.",
                location=f"--output_dir {self.folder}",
                hint="use the flags that they were prepared with or another directory, or replace them with "
                "--overwrite.",
            )

    def write_part(self, number: int) -> None:
        """Write the files and then the record of a part, each atomically."""
        part = self.parts[number]
        splits = {TRAIN: part.documents}
        if self.validation_fraction and isinstance(part.documents, Documents):
            splits[TRAIN], splits[VALIDATION] = part.documents.split(self.validation_fraction)
        files, statistics, columns_of_splits = {}, {}, {}
        for split, documents in splits.items():
            before = Counter(self.objective.statistics)
            with held_out_errors() if split == VALIDATION else nullcontext():
                columns, length = build_columns(replace(part, documents=documents).examples(self.objective))
            statistics[split] = dict(self.objective.statistics - before)
            if not length:
                continue
            file = self.directory / part_name(split, number)
            with replacing(file) as temporary:
                columns_of_splits = write_examples(temporary, columns, len(self.tokenizer))
                files[split] = PreparedFile(length, temporary.stat().st_size, file_digest(temporary))
        record = PartRecord(self.part_digest(number), part.source, files, columns_of_splits, statistics)
        write_json(self.directory / record_name(number), asdict(record))
        self.folder.upload([*(name for name, _ in record.named_files(number)), record_name(number)])

    def _complete_records(self, numbers: Sequence[int]) -> list[PartRecord | None]:
        """The record of each of the parts, or None if the part is missing or not complete."""
        sizes = self.folder.sizes()
        names = [record_name(number) for number in numbers]
        self.folder.download(name for name in names if name in sizes)
        return [self._complete_record(number, sizes) for number in numbers]

    def _complete_record(self, number: int, sizes: Mapping[str, int]) -> PartRecord | None:
        name = record_name(number)
        if name not in sizes:
            return None
        with suppress(CtxError):
            record = PartRecord.parse(read_json(self.directory / name), name)
            is_damaged = any(file.describe_damage(sizes.get(name)) for name, file in record.named_files(number))
            if record.identity == self.part_digest(number) and not is_damaged:
                return record
        return None

    def merge(self, with_digests: bool = True) -> PreparedCorpus:
        """Check all parts, and write the index.

        Args:
            with_digests: Compare the content of all files with their digests.

        Raises:
            CtxError: The directory has other examples, a part is missing or damaged, or there is no example.
        """
        self._check_identity(self.folder.sizes())
        records = self._complete_records(range(len(self.parts)))
        missing = [number for number, record in enumerate(records) if record is None]
        if missing:
            names = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise CtxError(
                f"{len(missing)} of {len(records)} parts are missing or damaged: {names}.",
                location=str(self.folder),
                hint="run `hf-ctxmodels data prepare` with the same flags but without --merge.",
            )
        complete = [record for record in records if record is not None]
        corpus = PreparedCorpus(self.directory, self.identity, complete, self.family)
        if with_digests and (changed := self._changed_files(corpus)):
            hint = "delete these files, and run `hf-ctxmodels data prepare` with the same flags again."
            raise damaged_files_error(changed, str(self.folder), hint)
        if not any(TRAIN in record.files for record in complete):
            has_single = any(record.statistics[TRAIN].get(SINGLE_DOCUMENT_PARTS) for record in complete)
            raise single_document_error(in_each_part=True) if has_single else no_examples_error()
        if self.validation_fraction and not any(VALIDATION in record.files for record in complete):
            has_text = any(record.statistics.get(VALIDATION) for record in complete)
            raise NoDocumentError(
                "The held-out documents have no examples: they are left out, or the objective needs two in a part."
                if has_text
                else "There is no held-out document with text.",
                location=f"--validation_fraction {self.validation_fraction}",
                hint="raise the fraction, or use more text.",
            )
        columns = next(record.columns for record in complete if record.columns)
        for number, record in enumerate(complete):
            if record.columns not in ({}, columns):
                raise CtxError(
                    f"The parts have different columns: {columns} and {record.columns}.",
                    location=f"{self.folder}/{record_name(number)}",
                    hint="make all parts with the same version of the package.",
                )
        with wrap_write_errors(self.directory):
            write_index(corpus, self.folder)
        return corpus

    def _changed_files(self, corpus: PreparedCorpus) -> dict[str, str]:
        """File -> "was changed ...", for each file with another digest than in its record."""
        with ThreadPoolExecutor(PARALLEL_READS) as executor:
            digests = executor.map(self.folder.digest, corpus.files)
            return {
                name: "was changed after it was written"
                for (name, file), digest in zip(corpus.files.items(), digests, strict=True)
                if digest != file.sha256
            }


_FILES = re.compile(
    rf"{re.escape(IDENTITY_FILE)}|{re.escape(INDEX_FILE)}|parts/part-\d+\.json|{TOKENIZER_FOLDER}/[^/]+|"
    r"dataset_dict\.json|[^/]+/(part-\d+\.arrow|state\.json|dataset_info\.json)|(.*/)?\.[^/]*\.writing"
)
