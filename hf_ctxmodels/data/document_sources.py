"""Sources of documents: the demo text, local files, the Hub."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.data.documents import Documents, LabelledPair, TextWithUnits, TranslatedText
from hf_ctxmodels.data.news_files import open_articles
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.data.text_files import (
    FILE_SUFFIXES,
    TextColumns,
    check_file,
    file_suffix,
    read_file,
    read_translated,
    record_to_document,
)

NONE = "-"
"""Value for a dataset without translations or language tag."""

_DIGESTED_BYTES = 1 << 20  # at both ends of a file: identifies large corpora without reading them completely


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
) -> Documents:
    """Open sources of documents; each iteration reads them again.

    Args:
        datasets: Sources, read one after the other: `demo`, a local `.txt`, `.jsonl` or `.parquet` file (plain or
            `.gz`), a pattern of such files as in `"corpus/*.txt.gz"`, a Hub id or directory for
            `datasets.load_dataset`, or FILE=FIRST,SECOND,LABEL: a table (see `data.table_files`) of labelled pairs and
            its columns.
        split: Split of a Hub dataset or directory.
        text_column: Column with the text of a record, except in text files.
        units_column: Column with a list of the phrases of a text that are masked as units; None for none.
        config_name: Configuration of a Hub dataset.
        streaming: Stream a Hub dataset instead of downloading it first. Local files are always streamed.
        skip_empty: Skip documents without text instead of raising.
        language_tags: Tag for each source, prepended to its sentences; `-` for none.
        translations: File for each source with the translations of its lines. A document is a line with its
            translation; pairs with an empty side are skipped. `-` for none.
        news_articles: The sources are .jsonl files of news articles, see `data.news_files.read_articles`.

    Raises:
        CtxError: A source does not exist, or the numbers of arguments do not match. Errors in the data are raised while
            iterating.
    """
    _check_numbers(datasets, language_tags, translations, news_articles)
    sources, columns = [], TextColumns(text_column, units_column)
    absent = [NONE] * len(datasets)
    for dataset, translation, tag in zip(datasets, translations or absent, language_tags or absent, strict=True):
        if translation != NONE:
            sources.append(_open_translated(dataset, translation, tag))
        elif news_articles:
            sources.append(open_articles(dataset))
        else:
            name, read = _open(dataset, split, columns, config_name, streaming)
            sources.append((name, read if tag == NONE else partial(_tagged, read, tag)))
    if len(sources) == 1:
        name, read = sources[0]
    else:
        name, read = ", ".join(name for name, _ in sources), partial(_chain, [read for _, read in sources])
    return Documents(name, read, skip_empty, sources=tuple(sources))


def _check_numbers(
    datasets: Sequence[str], language_tags: Sequence[str], translations: Sequence[str], news_articles: bool
) -> None:
    """Raise CtxError unless there is one tag and one file of translations for each dataset, or none."""
    if translations and (len(translations) != len(datasets) or len(language_tags) not in (0, len(datasets))):
        raise CtxError(
            f"{len(translations)} files of translations for {len(datasets)} datasets, with {len(language_tags)} "
            "language tags.",
            hint="set one file of translations for each dataset, and one tag for each or none.",
        )
    if len(language_tags) not in (0, len(datasets)):
        raise CtxError(
            f"{len(language_tags)} language tags for {len(datasets)} datasets.", hint="set one tag for each, or none."
        )
    if news_articles and (language_tags or translations):
        raise CtxError(
            "News articles have neither language tags nor translations.",
            location="--news_articles",
            hint="omit --language_tags and --translations.",
        )


def describe_content(source: str) -> str:
    """A description of a data source that does not depend on its location: name, size and a digest of both ends of its
    files; for other sources the name."""
    table, equals, columns = source.rpartition("=")
    if equals and not Path(source).expanduser().exists():
        return f"{describe_content(table)}={columns}"
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, glob(str(path), recursive=True))))
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
    dataset: str, split: str, columns: TextColumns, config_name: str | None, streaming: bool
) -> tuple[str, Callable[[], Iterator[list[str]]]]:
    """The name of a source, and its reader."""
    if dataset == "demo":
        return "demo", demo_documents
    path = Path(dataset).expanduser()
    table, equals, of_pairs = dataset.rpartition("=")
    if equals and not path.exists():
        return _open_pairs(table, of_pairs.split(","))
    if has_magic(dataset) and not path.exists():
        files = sorted(map(Path, glob(str(path), recursive=True)))
        for file in files or [path]:
            _check_document_file(file)
        return dataset, partial(_chain, [partial(read_file, file, columns) for file in files])
    if not path.is_dir() and (path.is_file() or file_suffix(path) in FILE_SUFFIXES):
        _check_document_file(path)
        return path.name, partial(read_file, path, columns)
    rows = _load_dataset(dataset, config_name, split, streaming)
    return dataset, partial(_hub_documents, rows, columns, dataset)


def _open_pairs(file: str, columns: Sequence[str]) -> tuple[str, Callable[[], Iterator[list[str]]]]:
    """The name of a table of pairs, and its reader."""
    if len(columns) != 3:
        raise CtxError(
            f"{len(columns)} columns: {', '.join(columns)}.",
            location=file,
            hint="name the columns of two texts and a label: FILE=FIRST,SECOND,LABEL.",
        )
    path = Path(file).expanduser()
    check_file(path)
    return path.name, partial(_labelled_pairs, str(path), columns)


def _open_translated(dataset: str, translation: str, tag: str) -> tuple[str, Callable[[], Iterator[list[str]]]]:
    """The names of a file and its translations, and their reader."""
    paths = Path(dataset).expanduser(), Path(translation).expanduser()
    for path in paths:
        check_file(path)
    return " with ".join(path.name for path in paths), partial(_translated, *paths, tag)


def _check_document_file(path: Path) -> None:
    if path.is_dir() or file_suffix(path) not in FILE_SUFFIXES:
        raise CtxError(
            f"Cannot read text from a file with the suffix {file_suffix(path)!r}.",
            location=str(path),
            hint=f"use one of {', '.join(FILE_SUFFIXES)} (also with .gz), a directory, a Hub id, or `demo`.",
        )
    check_file(path)


def _chain(sources: list[Callable[[], Iterator[list[str]]]]) -> Iterator[list[str]]:
    for read in sources:
        yield from read()


def _translated(text: Path, translation: Path, tag: str) -> Iterator[list[str]]:
    for line, translated in read_translated(text, translation):
        yield TranslatedText([line, translated if tag == NONE else f"{tag} {translated}"])


def _labelled_pairs(file: str, columns: Sequence[str]) -> Iterator[list[str]]:
    for row in read_table(file, columns):
        first, second, label = (str(row.values[column]).strip() for column in columns)
        if first and second:
            yield LabelledPair([first, second], label)


def _tagged(read: Callable[[], Iterator[list[str]]], tag: str) -> Iterator[list[str]]:
    for paragraphs in read():
        if isinstance(paragraphs, LabelledPair):
            yield LabelledPair([f"{tag} {text}" for text in paragraphs], paragraphs.label)
            continue
        sentences = [f"{tag} {sentence}" for paragraph in paragraphs for sentence in split_sentences(paragraph)]
        yield TextWithUnits(sentences, paragraphs.units) if isinstance(paragraphs, TextWithUnits) else sentences


def _load_dataset(dataset: str, config_name: str | None, split: str, streaming: bool) -> object:
    import datasets

    try:
        return datasets.load_dataset(dataset, config_name, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CtxError(
            f"The dataset cannot be opened: {error}{f' ({error.__cause__})' if error.__cause__ else ''}",
            location=f"{dataset} (configuration {config_name}, split {split})",
            hint="use the path of a text file, `demo`, or the Hub id of an accessible dataset.",
        ) from error


def _hub_documents(rows: object, columns: TextColumns, name: str) -> Iterator[list[str]]:
    for number, row in enumerate(rows):  # type: ignore[arg-type, var-annotated]
        yield record_to_document(row, columns, f"{name}, row {number}")
