"""Sources of documents, the demo text, local files and the Hub, and the flags that select them."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.loading import require_existing_path
from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.data.documents import Documents, LabelledPair, Reader, TextWithUnits, split_sentences
from hf_ctxmodels.data.news_files import EXAMPLE_ARTICLE, read_articles
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.data.text_files import (
    FILE_SUFFIXES,
    Separator,
    TextColumns,
    check_file,
    document_suffix,
    guess_separator,
    read_file,
    read_translated,
    record_to_document,
)

NONE = "-"
"""Value for a dataset without translations or language tag."""

_DIGESTED_BYTES = 1 << 20  # at both ends of a file: identifies large corpora without reading them completely


@dataclass
class DataArguments:
    """Documents, and their held-out share.

    The same documents are held out in all commands, independent of --seed.
    """

    dataset: list[str] = field(
        metadata={
            "help": "One or more of: `demo`, a local .txt, .jsonl or .parquet file (plain or .gz), other text as .gz, "
            "a quoted pattern of such files, a directory, a Hub id, or FILE=FIRST,SECOND,LABEL (a table of labelled "
            "pairs and its columns)."
        }
    )
    dataset_config: str | None = flag(None, "Configuration of a Hub dataset.")
    dataset_split: str = flag("train", "Split of a Hub dataset or directory.")
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
    streaming: bool = flag(False, "Stream the data instead of loading it first.")
    sampling_alpha: float | None = flag(
        None,
        "Sample from several --dataset with n sentences each in proportion to n^alpha, such as 0.3 or 0.5 for "
        "languages of unequal size; by default all text once per epoch.",
    )
    skip_empty_documents: bool = flag(False, "Skip documents without text instead of stopping.")
    validation_fraction: float = flag(0.05, "Share of held-out documents; 0 for none.")

    def load(self) -> tuple[Documents, Documents | None]:
        """The training documents, and the held-out documents or None."""
        documents = load_documents(
            *self.dataset,
            split=self.dataset_split,
            text_column=self.text_column,
            units_column=self.units_column,
            config_name=self.dataset_config,
            streaming=self.streaming,
            skip_empty=self.skip_empty_documents,
            language_tags=self.language_tags,
            translations=self.translations,
            news_articles=self.news_articles,
            document_separator=self.document_separator,
        )
        return documents.split(self.validation_fraction) if self.validation_fraction else (documents, None)


def load_documents(
    *datasets: str,
    split: str = "train",
    text_column: str = "text",
    units_column: str | None = None,
    config_name: str | None = None,
    streaming: bool = False,
    skip_empty: bool = False,
    language_tags: Sequence[str] = (),
    translations: Sequence[str] = (),
    news_articles: bool = False,
    document_separator: Separator | None = None,
) -> Documents:
    """Open sources of documents; each iteration reads them again. `DataArguments` documents the arguments.

    Local files are always streamed. Raises CtxError if a source does not exist, or the numbers of arguments do not
    match; errors in the data are raised while iterating.
    """
    numbers = len(translations) or len(datasets), len(language_tags) or len(datasets)
    if numbers != (len(datasets), len(datasets)):
        raise CtxError(
            f"{len(translations)} files of translations for {len(datasets)} datasets, with {len(language_tags)} "
            "language tags.",
            hint="set one file of translations for each dataset or none, and one tag for each or none.",
        )
    if news_articles and (language_tags or translations):
        raise CtxError(
            "News articles have neither language tags nor translations.",
            location="--news_articles",
            hint="omit --language_tags and --translations.",
        )
    sources: list[tuple[str, Reader]] = []
    columns = TextColumns(text_column, units_column)
    absent = [NONE] * len(datasets)
    for dataset, translation, tag in zip(datasets, translations or absent, language_tags or absent, strict=True):
        tag = "" if tag == NONE else f"{tag} "
        if translation != NONE:
            paths = Path(dataset).expanduser(), Path(translation).expanduser()
            for path in paths:
                check_file(path)
            sources.append((" with ".join(path.name for path in paths), partial(read_translated, *paths, tag)))
        elif news_articles:
            name, files = _match_files(dataset, (".jsonl",), f"write one article per line: {EXAMPLE_ARTICLE}")
            sources.append((name, partial(_chain, [partial(read_articles, file) for file in files])))
        else:
            name, read = _open(dataset, split, columns, config_name, streaming, document_separator)
            sources.append((name, partial(_tagged, read, tag) if tag else read))
    if len(sources) == 1:
        name, read = sources[0]
    else:
        name, read = ", ".join(name for name, _ in sources), partial(_chain, [read for _, read in sources])
    return Documents(name, read, skip_empty, sources=tuple(sources))


def describe_content(source: str) -> str:
    """A description of files or a directory that does not depend on their location: name, size and a digest of both
    ends of each file; other sources are described by their names."""
    table, equals, columns = source.rpartition("=")
    if equals and not Path(source).expanduser().exists():
        return f"{describe_content(table)}={columns}"
    path = Path(source).expanduser()
    pattern = str(path / "**") if path.is_dir() else str(path)
    files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, glob(pattern, recursive=True))))
    if not files:
        return source
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(content.read(_DIGESTED_BYTES))
            content.seek(max(content.tell(), file.stat().st_size - _DIGESTED_BYTES))
            digest.update(content.read(_DIGESTED_BYTES))
    return f"{path.name} ({sum(file.stat().st_size for file in files)} bytes, SHA-256 {digest.hexdigest()[:12]})"


def _open(
    dataset: str,
    split: str,
    columns: TextColumns,
    config_name: str | None,
    streaming: bool,
    separator: Separator | None,
) -> tuple[str, Reader]:
    """The name of a source, and its reader."""
    if dataset == "demo":
        return "demo", demo_documents
    path = Path(dataset).expanduser()
    table, equals, pair_columns = dataset.rpartition("=")
    if equals and not path.exists():
        path, names = Path(table).expanduser(), pair_columns.split(",")
        if len(names) != 3:
            raise CtxError(
                f"{len(names)} columns: {', '.join(names)}.",
                location=str(path),
                hint="name the columns of two texts and a label: FILE=FIRST,SECOND,LABEL.",
            )
        check_file(path)
        return path.name, partial(_labelled_pairs, path, names)
    is_pattern = has_magic(dataset) and not path.exists()
    if is_pattern or (not path.is_dir() and (path.is_file() or document_suffix(path) in FILE_SUFFIXES)):
        name, files = _match_files(dataset, FILE_SUFFIXES, "use such a file, a directory, a Hub id, or `demo`")
        return name, _file_reader(name, files, columns, separator)
    import datasets

    if path.is_dir() and (files := _text_files(path, split, config_name)):
        return path.name, _file_reader(path.name, files, columns, separator, is_directory=True)
    require_existing_path(path if dataset.startswith("~") else dataset, "dataset")
    try:
        rows = datasets.load_dataset(dataset, config_name, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CtxError(
            f"The dataset cannot be opened: {error}{f' ({error.__cause__})' if error.__cause__ else ''}",
            location=f"{dataset} (configuration {config_name}, split {split})",
            hint="use the path of a text file, `demo`, or the Hub id of an accessible dataset.",
        ) from error
    return dataset, partial(_hub_documents, rows, columns, dataset)


def _file_reader(
    name: str, files: list[Path], columns: TextColumns, separator: Separator | None, is_directory: bool = False
) -> Reader:
    """The reader of files; a guessed separator of text files other than blank lines is printed."""
    texts = [file for file in files if document_suffix(file) == ".txt"]
    if separator is None and texts:
        with suppress(CtxError):  # a file that cannot be read: an error of the first iteration
            separator = guess_separator(texts, is_directory)
        if separator in ("line", "file"):
            is_main_process = os.environ.get("RANK", "0") == "0"
            print_status(f"{name}: each {separator} is a document; --document_separator changes this", is_main_process)
    return partial(_chain, [partial(read_file, file, columns, separator or "blank") for file in files])


def _text_files(directory: Path, split: str, config_name: str | None) -> list[Path]:
    """The .txt files of a directory that belong to a split, by the names that `datasets` recognises ("train.txt",
    "test/a.txt"; without such names, all files are the split "train"). Empty if the directory has no .txt files.

    `datasets` would read each line of them as a document.

    Raises:
        CtxError: The split has .txt files and other data, or split or configuration select something else than files.
    """
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns

    location, files = f"{directory} (configuration {config_name}, split {split})", {}
    try:
        for name, patterns in get_data_patterns(str(directory)).items():
            names = DataFilesList.from_patterns(patterns, base_path=str(directory))
            files[str(name)] = [Path(file) for file in names if document_suffix(Path(file)) not in ("", ".md")]
    except (EmptyDatasetError, FileNotFoundError):
        return []  # `load_dataset` describes the problem
    has_text = {
        name: any(document_suffix(file) == ".txt" for file in split_files) for name, split_files in files.items()
    }
    if not any(has_text.values()):
        return []
    if split not in files or config_name is not None:
        raise CtxError(
            f"The .txt files of the directory have no configurations, and the splits {', '.join(files)}.",
            location=location,
            hint="omit --dataset_config, and use one of these splits.",
        )
    others = sorted({file.name for file in files[split] if document_suffix(file) != ".txt"})
    if has_text[split] and others:
        raise CtxError(
            f"The directory has .txt files and other data: {', '.join(others[:3])}.",
            location=location,
            hint=f"pass a quoted pattern, such as --dataset '{directory}/*.txt'.",
        )
    return sorted(files[split]) if has_text[split] else []


def _match_files(dataset: str, suffixes: Sequence[str], hint: str) -> tuple[str, list[Path]]:
    """The name of a file or pattern, and its files; raises CtxError if one is missing or has another suffix."""
    path = Path(dataset).expanduser()
    is_pattern = has_magic(dataset) and not path.exists()
    files = sorted(map(Path, glob(str(path), recursive=True))) if is_pattern else []
    for file in files or [path]:
        if file.is_dir() or document_suffix(file) not in suffixes:
            raise CtxError(
                f"Cannot read text from a file with the suffix {document_suffix(file)!r}; expected "
                f"{', '.join(suffixes)}, plain or with .gz.",
                location=str(file),
                hint=f"{hint}.",
            )
        check_file(file)
    return dataset if is_pattern else path.name, files or [path]


def _labelled_pairs(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    for row in read_table(path, columns):
        first, second, label = (str(row.values[column]).strip() for column in columns)
        if first and second:
            yield LabelledPair([first, second], label)


def _chain(readers: list[Reader]) -> Iterator[list[str]]:
    return chain.from_iterable(read() for read in readers)


def _tagged(read: Reader, tag: str) -> Iterator[list[str]]:
    """Documents whose sentences begin with a tag."""
    for paragraphs in read():
        if isinstance(paragraphs, LabelledPair):
            yield LabelledPair([f"{tag}{text}" for text in paragraphs], paragraphs.label)
            continue
        sentences = [f"{tag}{sentence}" for paragraph in paragraphs for sentence in split_sentences(paragraph)]
        yield TextWithUnits(sentences, paragraphs.units) if isinstance(paragraphs, TextWithUnits) else sentences


def _hub_documents(rows: Iterable[dict], columns: TextColumns, name: str) -> Iterator[list[str]]:
    for number, row in enumerate(rows):
        yield record_to_document(row, columns, f"{name}, row {number}")
