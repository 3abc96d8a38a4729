"""Sources of documents, the demo text, local files and the Hub, and the flags that select them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from hf_ctxmodels.core.console import is_main_process, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_conflicts, check_range, flag
from hf_ctxmodels.core.loading import read_utf8
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.data.documents import (
    PART_BYTES,
    Chunk,
    Documents,
    LabeledPair,
    Reader,
    TextWithCode,
    group_by_size,
    group_chunks,
    split_document,
)
from hf_ctxmodels.data.files import (
    DATA_SUFFIXES,
    DataFile,
    compression_suffix,
    file_name,
    file_suffix,
    is_directory,
    is_pattern,
    local_files,
    match_files,
    require_file,
    source_path,
    split_columns,
)
from hf_ctxmodels.data.hub_datasets import DatasetSource, is_dataset, source_name
from hf_ctxmodels.data.news_files import EXAMPLE_ARTICLE, read_articles
from hf_ctxmodels.data.table_files import COLUMN_NAMES_HINT, read_table
from hf_ctxmodels.data.text_files import (
    FILE_SUFFIXES,
    FileRange,
    Separator,
    TextColumns,
    document_suffix,
    guess_separator,
    open_parquet,
    read_file,
    read_translated,
    record_to_document,
)

NONE = "-"
"""Value for a dataset without translations, language tag or control code."""

SizedReader = tuple[Reader, int | None]
"""Reads consecutive documents, and their size in bytes, None if unknown."""


@dataclass
class DataArguments:
    """Documents.

    The same documents are held out in all commands, independent of --seed; of a Hub dataset of more than 64 MiB others
    with --streaming than without.
    """

    dataset: list[str] = field(
        metadata={
            "help": "One or more of: `demo`, a .txt, .jsonl or .parquet file (plain, .gz or .zst), text with the "
            "suffix of a language (.en), other text as .gz or .zst, a quoted pattern of such files, a directory, the "
            "URL of any of these (s3://, gs://, hf://, https://, ...), a Hub id, each directory or id optionally with "
            ":config=NAME,split=NAME (default: split=train), or FILE=FIRST,SECOND,LABEL (a table of labeled pairs and "
            "its columns)."
        }
    )
    language_tags: list[str] = flag(
        (), "Tag for each --dataset, such as `<de>`, prepended to its sentences or translations; `-` for none."
    )
    translations: list[str] = flag((), "File for each --dataset with the translations of its lines; `-` for none.")
    news_articles: bool = flag(
        False,
        "Each --dataset is a .jsonl of news articles with the fields domain, date, authors, title, article, summary.",
    )
    document_separator: Separator | None = flag(
        None,
        "End of a document in text files: `line`, `blank` line or end of `file`; by default guessed from the files.",
    )
    text_column: str = flag("text", "Column with the text of a document, except in .txt.")
    units_column: str | None = flag(
        None,
        "Column with a list of the phrases in a text that are masked as units; by default the phrases of the "
        "objective option `units`.",
    )
    control_codes: list[str] = flag(
        (),
        "Control code for each --dataset, the first token of each example of its documents; `-` for none.",
        conflicts=("units_column",),
    )
    control_column: str | None = flag(
        None,
        "Column with the control code of a document, such as its source or label, except in .txt.",
        conflicts=("control_codes", "units_column"),
    )
    streaming: bool = flag(False, "Stream the data instead of preparing it first.")
    sampling_alpha: float | None = flag(
        None,
        "Sample from several --dataset with n sentences each in proportion to n^alpha, such as 0.3 or 0.5 for "
        "languages of unequal size; by default all text once per epoch.",
    )
    skip_empty_documents: bool = flag(False, "Skip documents without text instead of stopping.")
    max_documents: int | None = flag(
        None, "Use only the first N documents, for trials (of each --dataset with --sampling_alpha)."
    )
    validation_fraction: float = flag(0.05, "Share of held-out documents; 0 for none.")

    def load(self) -> tuple[Documents, Documents | None]:
        """The training documents, and the held-out documents or None."""
        documents = self.open()
        return documents.split(self.validation_fraction) if self.validation_fraction else (documents, None)

    def open(self) -> Documents:
        """All documents; each iteration reads them again, and files are always streamed.

        Raises:
            CtxError: A source does not exist, the numbers of arguments do not match, or two options cannot be combined.
                Errors in the data are raised while iterating.
        """
        check_conflicts(self)
        options = self.translations, self.language_tags, self.control_codes
        if any(len(values) not in (0, len(self.dataset)) for values in options):
            raise CtxError(
                f"{len(self.translations)} files of translations for {len(self.dataset)} datasets, with "
                f"{len(self.language_tags)} language tags and {len(self.control_codes)} control codes.",
                hint="set one file of translations, one tag and one code for each dataset, or none.",
            )
        if self.news_articles and (any(options) or self.control_column):
            raise CtxError(
                "News articles have neither language tags nor translations nor control codes.",
                location="--news_articles",
                hint="omit --language_tags, --translations, --control_codes and --control_column.",
            )
        check_range(self, "max_documents", at_least=1)
        names: list[str] = []
        chunks: list[Chunk] = []
        absent = [NONE] * len(self.dataset)
        for dataset, translation, tag, code in zip(
            self.dataset, *(values or absent for values in options), strict=True
        ):
            tag = "" if tag == NONE else f"{tag} "
            if code != NONE and (translation != NONE or split_columns(dataset)[1]):
                raise CtxError(
                    "Translations and labeled pairs have no control codes.",
                    location=dataset,
                    hint=f"pass {NONE} instead of the code {code}.",
                )
            readers: list[SizedReader]
            if translation != NONE:
                text, translated = files = [require_file(path) for path in (dataset, translation)]
                name = " with ".join(file_name(file.path) for file in files)
                readers = [(partial(read_translated, text.path, translated.path, tag), _total_size(files))]
            elif self.news_articles:
                name, files = _match_documents(dataset, (".jsonl",), f"write one article per line: {EXAMPLE_ARTICLE}")
                readers = _group_files(files, read_articles)
            else:
                name, readers = _open(dataset, self)
                if tag:
                    readers = [(partial(_tagged, reader, tag), size) for reader, size in readers]
                if code != NONE:
                    readers = [(partial(_coded, reader, code), size) for reader, size in readers]
            chunks += [Chunk(len(names), reader, size) for reader, size in readers]
            names.append(name)
        return Documents(
            ", ".join(names),
            group_chunks(chunks),
            tuple(names),
            self.skip_empty_documents,
            max_documents=self.max_documents,
        )


def load_documents(*datasets: str, **options: Any) -> Documents:
    """Open the documents of one or more sources; each iteration reads them again.

    Args:
        datasets: Sources, as in `DataArguments.dataset`.
        **options: Other fields of `DataArguments`, for example `text_column`. No documents are held out:
            `validation_fraction` has no effect, see `Documents.split`.

    Raises:
        CtxError: See `DataArguments.open`.
    """
    return DataArguments([*datasets], **{**options, "validation_fraction": 0.0}).open()


def _open(dataset: str, data: DataArguments) -> tuple[str, list[SizedReader]]:
    """The name of a source, and its readers."""
    if dataset == "demo":
        return "demo", [(demo_documents, None)]
    columns = TextColumns(data.text_column, data.units_column, data.control_column)
    separator = data.document_separator
    path, pair_columns = split_columns(dataset)
    if pair_columns:
        if len(pair_columns) != 3:
            raise CtxError(
                f"{len(pair_columns)} columns: {', '.join(pair_columns)}.",
                location=path,
                hint="name the columns of two texts and a label: FILE=FIRST,SECOND,LABEL.",
            )
        size = None if is_dataset(path) else require_file(path).size
        return source_name(path), [(partial(_labeled_pairs, path, pair_columns), size)]
    source = DatasetSource.parse(dataset)  # `path` is without ./
    path = local_path(source.name)
    is_file_name = bool(compression_suffix(path)) or file_suffix(path) in DATA_SUFFIXES  # else it may be a Hub id
    if is_pattern(path) or ((is_file_name or is_url(path) or os.path.isfile(path)) and not is_directory(path)):
        name, files = _match_documents(dataset, FILE_SUFFIXES, "use such a file, a directory, a Hub id, or `demo`")
        return name, _document_readers(name, files, columns, separator)
    if is_directory(path):
        files = _directory_files(source)
        name = file_name(path.rstrip("/"))
        if files:
            return name, _document_readers(name, files, columns, separator, is_directory=True)
    return dataset, _hub_readers(source, columns, data)


def document_files(sources: Iterable[str]) -> list[str]:
    """The existing local files of sources of `load_documents`: files, and all files of patterns and directories."""
    return [file for source in sources for file in local_files(source_path(source))]


def _hub_readers(source: DatasetSource, columns: TextColumns, data: DataArguments) -> list[SizedReader]:
    """Readers of a Hub dataset, or of a directory in another format, by ranges of rows or by shards of a stream. Shards
    number the documents differently than ranges, which is printed if documents are held out by their numbers."""
    import datasets

    rows = source.load(data.streaming)
    read = partial(_hub_documents, columns=columns, name=source.name)
    if isinstance(rows, datasets.Dataset):
        num_bytes = rows.data.nbytes
        step = max(1, len(rows) * PART_BYTES // max(num_bytes, PART_BYTES))
        return [
            (partial(read, rows, first=first, count=step), num_bytes * step // len(rows))
            for first in range(0, len(rows), step)
        ] or [(partial(read, rows), 0)]
    splits: Mapping[str, Any] = rows.info.splits or {}
    size = splits[source.split].num_bytes if source.split in splits else None
    count = rows.num_shards
    print_status(
        f"warning: {source}: --streaming may hold out other documents than commands without it; pass it to all "
        "commands or to none",
        is_main_process() and data.validation_fraction > 0 and (size is None or size > PART_BYTES),
    )
    shard_size = size // count if size else None if count == 1 else PART_BYTES  # shards of unknown size are large
    return [(partial(read, rows.shard(count, index) if count > 1 else rows), shard_size) for index in range(count)]


def _document_readers(
    name: str, files: list[DataFile], columns: TextColumns, separator: Separator | None, is_directory: bool = False
) -> list[SizedReader]:
    """The readers of files; a guessed separator of text files other than blank lines, and a large file that has one
    part, are printed."""
    texts = [file for file in files if document_suffix(file.path) == ".txt"]
    if separator is None and texts:
        with suppress(CtxError):  # a file that cannot be read: an error of the first iteration
            separator = guess_separator(texts, is_directory)
        if separator in ("line", "file"):
            print_status(
                f"{name}: each {separator} is a document; --document_separator changes this", is_main_process()
            )
    large_files = [file.path for file in files if compression_suffix(file.path) and (file.size or 0) > 8 * PART_BYTES]
    if large_files:
        line = (
            f"{file_name(large_files[0])} is compressed and large: one process reads it; split it to read in parallel"
        )
        print_status(line, is_main_process())
    read_range = partial(read_file, columns=columns, separator=separator or "blank")
    return _group_files(files, read_range, has_ranges=separator != "file")


def _total_size(files: Iterable[DataFile]) -> int | None:
    """Size in bytes; None if the size of a file is unknown."""
    sizes = [file.size for file in files]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _group_files(
    files: Sequence[DataFile], read_range: Callable[[FileRange], Iterator[list[str]]], has_ranges: bool = True
) -> list[SizedReader]:
    """Readers of consecutive files of up to `PART_BYTES` together, and of ranges of larger files."""
    readers: list[SizedReader] = []
    for group in group_by_size(files, lambda file: file.size):
        file, size = group[0], _total_size(group)
        is_divisible = file.has_ranges and not compression_suffix(file.path)
        is_divisible &= has_ranges or document_suffix(file.path) != ".txt"
        if is_divisible and (size or 0) > PART_BYTES:  # then it is the only file of the group
            readers += [
                (partial(_read_ranges, read_range, (selection,)), length) for selection, length in _ranges(file)
            ]
        else:
            selections = tuple(FileRange(file.path) for file in group)
            readers.append((partial(_read_ranges, read_range, selections), size))
    return readers


def _ranges(file: DataFile) -> Iterator[tuple[FileRange, int]]:
    """Ranges of a file of about `PART_BYTES`, and their sizes: row groups of a Parquet file, or bytes."""
    size = file.size or 0
    if document_suffix(file.path) != ".parquet":
        for start in range(0, size, PART_BYTES):
            stop = start + PART_BYTES
            yield FileRange(file.path, start, stop if stop < size else None), min(stop, size) - start
        return
    metadata = open_parquet(file.path).metadata
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    bytes_per_row = size / max(1, metadata.num_rows)
    start = 0
    for stop in range(1, len(groups) + 1):
        if stop == len(groups) or sum(groups[start : stop + 1]) * bytes_per_row > PART_BYTES:
            yield FileRange(file.path, start, stop), round(sum(groups[start:stop]) * bytes_per_row)
            start = stop


def _directory_files(source: DatasetSource) -> list[DataFile]:
    """The files of a directory that belong to a split, by the names that `datasets` recognizes ("train.txt",
    "test/a.jsonl"; without such names, all files are the split "train"). Empty if `datasets` is to read the directory:
    other formats than `FILE_SUFFIXES`, or configurations.

    Raises:
        CtxError: The split has files of several formats, or .txt files and a split or configuration that select
            something else than files.
    """
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns

    directory, split, location = source.name, source.split, str(source)
    base_path = directory if is_url(directory) else escape(directory)  # `datasets` reads it as a pattern
    files: dict[str, list[str]] = {}
    try:
        for name, patterns in get_data_patterns(base_path).items():
            names = DataFilesList.from_patterns(patterns, base_path=base_path)
            files[str(name)] = [file for file in names if document_suffix(file) not in ("", ".md")]
    except (EmptyDatasetError, FileNotFoundError):
        return []  # `load_dataset` describes the problem
    suffixes = {name: {document_suffix(file) for file in split_files} for name, split_files in files.items()}
    has_text = any(".txt" in split_suffixes for split_suffixes in suffixes.values())
    if not has_text:
        card = Path(directory, "README.md")
        has_configurations = source.config is not None or (card.is_file() and "configs:" in read_utf8(card))
        if has_configurations or not files.get(split) or not suffixes[split] <= set(FILE_SUFFIXES):
            return []
    if source.config is not None:
        raise CtxError(
            "The .txt files of the directory have no configurations.", location=location, hint="omit config=."
        )
    if split not in files:
        raise CtxError(
            f"{directory} has no split {split!r}.",
            location=location,
            hint=f"use one of: {', '.join(files)}.",
        )
    if len(suffixes[split]) > 1:
        file_names = sorted({file_name(file) for file in files[split]})
        main_suffix = ".txt" if ".txt" in suffixes[split] else document_suffix(file_names[0])
        other_files = [name for name in file_names if document_suffix(name) != main_suffix]
        raise CtxError(
            f"The directory has {main_suffix} files and other data: {', '.join(other_files[:3])}.",
            location=location,
            hint=f"pass a quoted pattern, such as --dataset '{directory}/*{main_suffix}'.",
        )
    paths = sorted(files[split], key=lambda file: PurePosixPath(file))
    return [require_file(path) for path in paths]


def _match_documents(dataset: str, suffixes: Sequence[str], hint: str) -> tuple[str, list[DataFile]]:
    """The name of a file or pattern, and its files; raises CtxError if one is missing or has another suffix."""
    path = local_path(dataset)
    files = match_files(path)
    for file in files:
        if document_suffix(file.path) not in suffixes:
            raise CtxError(
                f"Cannot read text from a file with the suffix {document_suffix(file.path)!r}; expected "
                f"{', '.join(suffixes)}, plain or with .gz or .zst.",
                location=file.path,
                hint=f"{hint}.",
            )
    return dataset if is_pattern(path) else file_name(path), files


def _labeled_pairs(path: str, columns: Sequence[str]) -> Iterator[list[str]]:
    for row in read_table(path, columns, column_hint=COLUMN_NAMES_HINT):
        cells = [row.values[column] for column in columns]
        first, second, label = ("" if cell is None else str(cell).strip() for cell in cells)
        if first and second:
            yield LabeledPair([first, second], label)


def _read_ranges(
    read_range: Callable[[FileRange], Iterator[list[str]]], selections: Sequence[FileRange]
) -> Iterator[list[str]]:
    return chain.from_iterable(map(read_range, selections))


def _tagged(reader: Reader, tag: str) -> Iterator[list[str]]:
    """Documents whose sentences begin with a tag."""
    for paragraphs in reader():
        if isinstance(paragraphs, LabeledPair):
            yield LabeledPair([f"{tag}{text}" for text in paragraphs], paragraphs.label)
        else:
            yield split_document(paragraphs, prefix=tag)


def _coded(reader: Reader, code: str) -> Iterator[list[str]]:
    """Documents with a control code."""
    return (TextWithCode(paragraphs, code) for paragraphs in reader())


def _hub_documents(
    rows: Any, columns: TextColumns, name: str, first: int = 0, count: int | None = None
) -> Iterator[list[str]]:
    """Documents of all rows, or of `count` rows from the row `first` on."""
    if count is not None:
        rows = rows.select(range(first, min(first + count, len(rows))))
    for number, row in enumerate(rows, first):
        yield record_to_document(row, columns, f"{name}, row {number}")
