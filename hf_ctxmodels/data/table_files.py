"""Files of fine-tuning data -> rows and sentences, with errors that name the file and the line.

Files may be compressed (`.gz` or `.zst`), or URLs:

- tables: `.csv` (with quotes), `.tsv` and `.txt` (tab-separated, quotes are literal, as in GLUE), whose first line has
  the names of the columns, unless columns are numbers; `.jsonl` (one object per line), `.parquet`, and datasets of the
  Hub (see `hub_datasets`);
- tagged sentences: CoNLL columns (one word per line, a blank line ends a sentence) and `.conllu`.
"""

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.files import file_suffix, missing_file_error
from hf_ctxmodels.data.record_files import RECORD_SUFFIXES, has_records, read_records
from hf_ctxmodels.data.text_files import read_text

CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
COLUMN_NAMES_HINT = "use column names of the file."
_COLUMN_FLAGS_HINT = (
    "select other columns (--text_columns, --label_column); in a file without a header use numbers (1 = first, -1 = "
    "last)."
)
_DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}


class MissingColumnError(CtxError):
    """A table lacks a column."""


@dataclass(frozen=True)
class Row:
    """The selected columns of a row of a table, and its location (`file:line`)."""

    values: dict[str, Any]
    location: str


@dataclass(frozen=True)
class TaggedSentence:
    """Words with one tag each, and the location of the first (`file:line`)."""

    words: list[str]
    tags: list[str]
    location: str


def read_table(
    file: str | Path,
    columns: Sequence[str],
    suffix: str | None = None,
    *,
    column_hint: str = _COLUMN_FLAGS_HINT,
    label_names: bool = True,
) -> list[Row]:
    """The selected columns of a table, as rows in file order.

    Columns are names: of the header line, or of the columns of records, such as `translation.de` for a value within an
    object. For a file without a header, they are numbers (1 is the first, -1 the last).

    Args:
        suffix: Replaces the suffix of the file.
        column_hint: Hint of the error for a missing column.
        label_names: See `read_records`.

    Raises:
        CtxError: The format is unknown, a column is missing or repeated, a line has another number of columns, or
            invalid quotes or JSON.
    """
    rows = []
    if suffix is None and has_records(file):
        for record, location in read_records(file, label_names, columns):
            for column in columns:
                _column_index(column, list(record), location, column_hint)
            rows.append(Row({column: record[column] for column in columns}, str(location)))
    elif (suffix := suffix or file_suffix(file)) in _DELIMITERS:
        rows += _read_delimited(file, columns, _DELIMITERS[suffix], column_hint)
    elif not is_url(file) and not os.path.exists(local_path(file)):
        raise missing_file_error(str(file))
    else:
        raise CtxError(
            f"Not a table: the suffix is {suffix!r}, expected {', '.join((*_DELIMITERS, *RECORD_SUFFIXES))}, plain or "
            "with .gz or .zst.",
            location=str(file),
            hint="rename or convert the file, or use another task.",
        )
    if not rows:
        raise CtxError("No examples.", location=str(file), hint="use a file with at least one example.")
    return rows


def read_texts(file: str | Path, column: str) -> list[Row]:
    """Read one column of a table, or the lines of a `.txt` file whose first line is not a header with this column.
    Blank lines are skipped."""
    if file_suffix(file) == ".txt":
        lines = read_text(file).split("\n")
        if column not in lines[0].rstrip("\r").split("\t"):
            return [Row({column: line.strip()}, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    return read_table(file, [column])


def parse_number(value: Any) -> float | None:
    """The finite number in a cell of a table; None for other values, also for true, false and texts such as "1_000" or
    "nan", which Python converts."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", value):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def parse_strings(value: Any) -> list[str]:
    """The texts or finite numbers of a list, as texts; empty for other values, also for a list with null."""
    is_valid = isinstance(value, list) and all(
        isinstance(item, str) or parse_number(item) is not None for item in value
    )
    return [*map(str, value)] if is_valid else []


def require_labels(rows: Sequence[Row], column: str) -> None:
    """Raise CtxError if all labels in a column are -1, as in the test sets of GLUE, whose labels are not public."""
    if rows and all(parse_number(row.values.get(column)) == -1 for row in rows):
        raise CtxError(
            f"All {len(rows):,} labels in {column!r} are -1: the examples have no labels, as in the test sets of GLUE.",
            location=rows[0].location,
            hint="use a file with labels; `hf-ctxmodels predict` predicts labels without scores.",
        )


def are_column_numbers(columns: Iterable[str]) -> bool:
    """Whether columns are selected by their numbers (1 is the first, -1 the last), not by names: all are numbers."""
    return all(column.strip().removeprefix("-").isdecimal() for column in columns)


def has_columns(file: str | Path, columns: Sequence[str]) -> bool:
    """Whether a file has all these columns: in the header of a table, in the first record, or as columns of CoNLL-U."""
    suffix = file_suffix(file)
    if has_records(file):
        return set(columns).issubset(next((record for record, _ in read_records(file, columns=columns)), ()))
    if suffix in _DELIMITERS:
        try:
            next(_read_delimited(file, columns, _DELIMITERS[suffix]), None)
        except MissingColumnError:
            return False
        return True
    return suffix == ".conllu" and set(columns).issubset(CONLLU_COLUMNS)


def has_labels(file: str | Path, column: str) -> bool:
    """Whether a file has labels: not if it is a `.txt` file, or the column is missing, or all its values are empty or
    -1."""
    if file_suffix(file) == ".txt":
        return False
    if has_records(file):
        return any(is_label(record.get(column)) for record, _ in read_records(file, columns=[column]))
    try:
        labels = [row.values[column] for row in read_table(file, [column])]
    except MissingColumnError:
        return False
    return any(is_label(label) for label in labels)


def is_label(value: Any) -> bool:
    """Whether a value of a table is a label: not if it is empty, or -1 as in the test sets of GLUE."""
    if value in (None, []) or value != value:  # NaN, as pandas writes a missing value
        return False
    return str(value).strip() != "" and parse_number(value) != -1


def _read_delimited(
    file: str | Path, columns: Sequence[str], delimiter: str, column_hint: str = _COLUMN_FLAGS_HINT
) -> Iterator[Row]:
    # `strict`: otherwise a field without its closing quote would contain all rows up to the next quote
    quoting: dict[str, Any] = {"strict": True} if delimiter == "," else {"quoting": csv.QUOTE_NONE}
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    reader = csv.reader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, **quoting)
    indices: dict[str, int] = {}
    width = 0
    while True:
        first_line = reader.line_num + 1  # a row may span several lines: quoted fields may have line breaks
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise CtxError(
                f"The quotes of a field are not valid CSV: {error}.",
                location=f"{file}:{first_line}",
                hint='add the closing quote, and write a quote within a quoted field as "".',
            ) from error
        if cells is None:
            return
        if not cells:
            continue
        if not indices:
            width = len(cells)
            is_numbered = are_column_numbers(columns)
            names = [*map(str, (*range(1, width + 1), *range(-width, 0)))] if is_numbered else cells
            _check_delimiter(names, columns, file)
            indices = {column: _column_index(column, names, file, column_hint) % width for column in columns}
            if not is_numbered:
                continue
        if len(cells) != width:
            raise CtxError(
                f"{len(cells)} columns, expected {width} as in the first line: {str(cells)[:200]}",
                location=f"{file}:{first_line}",
                hint="correct the line; in .csv, put fields with commas in double quotes.",
            )
        yield Row({column: cells[index] for column, index in indices.items()}, f"{file}:{first_line}")


def _check_delimiter(names: Sequence[str], columns: Sequence[str], file: str | Path) -> None:
    """Raise CtxError if the only column has the names of the columns with another delimiter."""
    for delimiter, description in {"\t": "tabs", ",": "commas", ";": "semicolons"}.items() if len(names) == 1 else ():
        if {*columns} <= {name.strip().strip('"') for name in names[0].split(delimiter)} - {*names}:
            raise CtxError(
                f"The columns are separated by {description}: {names[0]!r}.",
                location=str(file),
                hint="use commas in .csv files, and tabs in .tsv and .txt files.",
            )


def _column_index(column: str, names: Sequence[str], file: object, hint: str = _COLUMN_FLAGS_HINT) -> int:
    if column not in names:
        raise MissingColumnError(
            f"No column {column!r}. The columns are: {', '.join(map(repr, names))}.",
            location=str(file),
            hint=hint,
        )
    if (count := list(names).count(column)) > 1:
        raise CtxError(
            f"{count} columns are named {column!r}.", location=str(file), hint="rename them, or remove all but one."
        )
    return list(names).index(column)


def split_cells(line: str, delimiter: str | None = None) -> list[str]:
    """The cells of a line, separated by a delimiter or, without one, by spaces and tabs. (`str.split` would also divide
    words at no-break spaces.)"""
    return re.findall(r"[^ \t\r\n]+", line) if delimiter is None else line.split(delimiter)


def line_blocks(file: str | Path) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines of each sentence; blank lines and `-DOCSTART-` lines separate sentences."""
    lines = enumerate(read_text(file).split("\n"), start=1)
    for has_word, block in groupby(lines, lambda pair: bool(pair[1].strip()) and not pair[1].startswith("-DOCSTART-")):
        if has_word:
            yield [(number, line.rstrip("\r")) for number, line in block]


def _sentences(blocks: Iterable[list[tuple[str, str, str]]], file: str | Path) -> list[TaggedSentence]:
    """Sentences from blocks of (word, tag, location); raises CtxError if there is none."""
    sentences = []
    for block in blocks:
        if block:
            words, tags, locations = zip(*block)
            sentences.append(TaggedSentence([*words], [*tags], locations[0]))
    if not sentences:
        raise CtxError(
            "No sentences.", location=str(file), hint="write a word and its tag per line, with blank lines between."
        )
    return sentences


def read_conll(file: str | Path, word_column: int = 1, tag_column: int = -1) -> list[TaggedSentence]:
    """Sentences of a file with one word per line in columns and a blank line after each sentence.

    Columns are numbered from 1; -1 is the last. They are separated by tabs if the first line has one, else by spaces.
    Entity tags in IOB1 are converted to BIO, and language codes as in WikiANN (`en:Paris`) are removed. Raises CtxError
    for a line with a wrong number of columns.
    """
    blocks = list(line_blocks(file))
    first = blocks[0][0][1] if blocks else ""
    delimiter = "\t" if "\t" in first else None
    width = len(split_cells(first, delimiter))

    def parse(number: int, line: str) -> tuple[str, str, str]:
        cells = split_cells(line, delimiter)
        if len(cells) != width or not 1 <= abs(word_column) <= width or not 1 <= abs(tag_column) <= width:
            error_class = MissingColumnError if abs(tag_column) > width == len(cells) else CtxError
            raise error_class(
                f"{len(cells)} column(s) in {line[:100]!r}; expected {width} as in the first line, with the word in "
                f"column {word_column} and its tag in column {tag_column}.",
                location=f"{file}:{number}",
                hint="write a word and its tag per line, or set --text_columns (word) and --label_column (tag).",
            )
        word, tag = (cells[column - (column > 0)] for column in (word_column, tag_column))
        return word, tag.strip(), f"{file}:{number}"

    sentences = _sentences(([parse(*line) for line in block] for block in blocks), file)
    code = re.match(r"[a-z]{2,3}:", sentences[0].words[0])
    if code is not None and all(word.startswith(code[0]) for sentence in sentences for word in sentence.words):
        sentences = [
            replace(sentence, words=[word.removeprefix(code[0]) for word in sentence.words]) for sentence in sentences
        ]
    return to_bio(sentences)


def read_conllu(file: str | Path, word_column: str = "FORM", tag_column: str = "UPOS") -> list[TaggedSentence]:
    """Sentences of a CoNLL-U file (Universal Dependencies), with two of its columns as words and tags, without
    multiword-token lines (`1-2`) and empty nodes (`8.1`); raises CtxError for an unknown column or an invalid line."""
    for column in (word_column, tag_column):
        _column_index(column, CONLLU_COLUMNS, file)
    word_index, tag_index = CONLLU_COLUMNS.index(word_column), CONLLU_COLUMNS.index(tag_column)

    def parse(number: int, line: str) -> list[tuple[str, str, str]]:
        cells = conllu_cells(line, f"{file}:{number}")
        return [(cells[word_index], cells[tag_index], f"{file}:{number}")] if cells else []

    return _sentences(([word for line in block for word in parse(*line)] for block in line_blocks(file)), file)


def conllu_cells(line: str, location: str) -> list[str]:
    """The ten cells of a word of a CoNLL-U file; no cells for a comment, a multiword token (`1-2`) or an empty node
    (`8.1`). Raises CtxError for an invalid line."""
    if line.startswith("#"):
        return []
    cells = line.split("\t")
    if len(cells) != len(CONLLU_COLUMNS) or not re.fullmatch(r"\d+([-.]\d+)?", cells[0]):
        raise CtxError(
            f"Not a CoNLL-U line: {line[:100]!r} has {len(cells)} tab-separated column(s); expected "
            f"{len(CONLLU_COLUMNS)} ({', '.join(CONLLU_COLUMNS)}), the first a number.",
            location=location,
            hint="correct the line, or rename a file with different columns to .conll.",
        )
    return cells if cells[0].isdecimal() else []


def iob1_to_bio(tags: Sequence[str]) -> list[str]:
    """IOB1 tags as BIO; BIO tags are unchanged.

    IOB1 (Ramshaw & Marcus 1995) has `B-` only if an entity follows another of its type; BIO (also IOB2) always.
    """
    converted = []
    previous = "O"
    for tag in tags:
        converted.append("B" + tag[1:] if tag.startswith("I-") and previous[2:] != tag[2:] else tag)
        previous = tag
    return converted


def to_bio(sentences: list[TaggedSentence]) -> list[TaggedSentence]:
    """Sentences with IOB1 tags converted to BIO; other sentences unchanged."""
    if not is_bio(sorted({tag for sentence in sentences for tag in sentence.tags})):
        return sentences
    return [TaggedSentence(sentence.words, iob1_to_bio(sentence.tags), sentence.location) for sentence in sentences]
