"""Files of fine-tuning data -> rows and sentences, with errors that name the file and the line.

Three kinds of file, each plain or gzipped (`.gz`):

- tables: `.csv` (quoted as spreadsheets write it), `.tsv` and `.txt` (tab-separated, quotes are literal, as in GLUE)
  and `.jsonl` (one object a line). The first line names the columns, unless columns are asked for by number;
- tagged sentences: CoNLL columns (one word a line, a blank line ends a sentence) and `.conllu`;
- SQuAD's JSON, in `question_answering.py`.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_kind, read_objects, read_text

CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}


@dataclass(frozen=True)
class Row:
    """The asked columns of one line of a table, and where it stands (`file:line`)."""

    values: dict[str, Any]
    where: str


@dataclass(frozen=True)
class TaggedSentence:
    """Words with one tag each, and where the sentence begins (`file:line`)."""

    words: list[str]
    tags: list[str]
    where: str


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def read_table(file: str | Path, columns: Sequence[str]) -> list[Row]:
    """The given columns of a CSV, TSV or JSONL file, as rows in file order.

    Column names are those of the header line or of the JSON keys. Names that are all numbers (1 is the first column)
    say that the file has no header. Values are strings, or what JSON holds.

    Raises CtxError for an unknown format, a missing column (lists those there are), a line of another width, bad JSON.
    """
    suffix = file_kind(Path(file))
    if suffix == ".jsonl":
        rows = list(_read_jsonl(file, columns))
    elif suffix in _DELIMITERS:
        rows = list(_read_delimited(file, columns, _DELIMITERS[suffix]))
    else:
        raise CtxError(
            f"The name does not tell the format of a table; expected an ending {', '.join((*_DELIMITERS, '.jsonl'))}, "
            "or one of these with .gz.",
            location=str(file),
            hint="rename or convert the file.",
        )
    if not rows:
        raise CtxError("No examples.", location=str(file), hint="give a file with at least one example.")
    return rows


def _read_delimited(file: str | Path, columns: Sequence[str], delimiter: str) -> Iterator[Row]:
    quoting: dict[str, Any] = {} if delimiter == "," else {"quoting": csv.QUOTE_NONE}
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 131,072 characters
    reader = csv.reader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, **quoting)
    position: dict[str, int] = {}
    width = 0
    while True:
        first_line = reader.line_num + 1  # a quoted field may hold line breaks: name the line where the row begins
        cells = next(reader, None)
        if cells is None:
            return
        if not cells:
            continue
        if not position:
            width = len(cells)
            numbered = all(column.isdecimal() for column in columns)
            names = [str(number + 1) for number in range(width)] if numbered else cells
            position = {column: _position(column, names, file) for column in columns}
            if not numbered:
                continue
        if len(cells) != width:
            raise CtxError(
                f"{len(cells)} columns, expected {width} as in the first line: {str(cells)[:200]}",
                location=f"{file}:{first_line}",
                hint="mend the line; in .csv a field that holds a comma stands in double quotes.",
            )
        yield Row({column: cells[index] for column, index in position.items()}, f"{file}:{first_line}")


def _position(column: str, names: Sequence[str], file: str | Path) -> int:
    if column not in names:
        raise CtxError(
            f"No column {column!r}. The columns are: {', '.join(map(repr, names))}.",
            location=str(file),
            hint="choose with --text_columns and --label_column; numbers (1 = first) mean a file without a header.",
        )
    return list(names).index(column)


def _read_jsonl(file: str | Path, columns: Sequence[str]) -> Iterator[Row]:
    for record, where in read_objects(file):
        for column in columns:
            _position(column, list(record), where)
        yield Row({column: record[column] for column in columns}, where)


# ----------------------------------------------------------------------------------------------------------------------
# Tagged sentences
# ----------------------------------------------------------------------------------------------------------------------


def read_conll(file: str | Path, word_column: int = 1, tag_column: int = -1) -> list[TaggedSentence]:
    """Sentences of a file with one word a line in columns and a blank line after each sentence.

    Columns are numbered from 1; -1 is the last. They are separated by a tab if the file's first line holds one, else by
    blanks. `-DOCSTART-` lines are skipped. Entity tags in IOB1 are converted to BIO.

    Raises CtxError for a line whose number of columns differs from the first line's, or which has too few.
    """
    delimiter: str | None = None
    width = 0
    sentences: list[TaggedSentence] = []
    words: list[str] = []
    tags: list[str] = []
    begin = 1

    def end_sentence() -> None:
        if words:
            sentences.append(TaggedSentence(list(words), list(tags), f"{file}:{begin}"))
            words.clear()
            tags.clear()

    for number, line in enumerate(read_text(file).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("-DOCSTART-"):
            end_sentence()
            begin = number + 1
            continue
        if not width:
            delimiter = "\t" if "\t" in line else None
        cells = line.split(delimiter)
        width = width or len(cells)
        if len(cells) != width or not 1 <= abs(word_column) <= width or not 1 <= abs(tag_column) <= width:
            raise CtxError(
                f"{len(cells)} column(s) in {line[:100]!r}; expected {width} as in the first line, with the word in "
                f"column {word_column} and its tag in column {tag_column}.",
                location=f"{file}:{number}",
                hint="mend the line, or choose columns with --text_columns (word) and --label_column (tag).",
            )
        words.append(cells[_index(word_column)])
        tags.append(cells[_index(tag_column)])
    end_sentence()
    if not sentences:
        raise CtxError(
            "No sentences.", location=str(file), hint="write one word and its tag a line, a blank line after each."
        )
    return _to_bio(sentences)


def _index(column: int) -> int:
    return column - 1 if column > 0 else column


def read_conllu(file: str | Path, word_column: str = "FORM", tag_column: str = "UPOS") -> list[TaggedSentence]:
    """Sentences of a CoNLL-U file (Universal Dependencies), with the given columns as words and tags.

    Comments, multiword-token lines (`1-2`) and empty nodes (`8.1`) are skipped: the syntactic words carry the tags.

    Raises CtxError for an unknown column or a line that has not ten tab-separated columns.
    """
    for column in (word_column, tag_column):
        _position(column, CONLLU_COLUMNS, file)
    word_index, tag_index = CONLLU_COLUMNS.index(word_column), CONLLU_COLUMNS.index(tag_column)
    sentences = []
    words: list[str] = []
    tags: list[str] = []
    begin = 1
    for number, line in enumerate([*read_text(file).split("\n"), ""], start=1):
        line = line.rstrip("\r")
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(words, tags, f"{file}:{begin}"))
            words, tags, begin = [], [], number + 1
            continue
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) != len(CONLLU_COLUMNS) or not re.fullmatch(r"\d+([-.]\d+)?", cells[0]):
            raise CtxError(
                f"Not a CoNLL-U line: {line[:100]!r} has {len(cells)} tab-separated column(s); expected "
                f"{len(CONLLU_COLUMNS)} ({', '.join(CONLLU_COLUMNS)}), the first a number.",
                location=f"{file}:{number}",
                hint="mend the line, or name a file in other columns .conll.",
            )
        if cells[0].isdecimal():
            words.append(cells[word_index])
            tags.append(cells[tag_index])
    if not sentences:
        raise CtxError("No sentences.", location=str(file), hint="give a file with at least one sentence.")
    return sentences


def is_bio(tags: Sequence[str]) -> bool:
    """Whether every tag is `O`, `B-...` or `I-...`: entities or chunks, not parts of speech."""
    return all(re.fullmatch(r"O|[BI]-.+", tag) for tag in tags)


def iob1_to_bio(tags: Sequence[str]) -> list[str]:
    """The same entities with `B-` at the start of each; tags that are BIO already come back unchanged.

    IOB1 (Ramshaw & Marcus 1995) writes `B-` only where an entity touches another of its type; BIO (also IOB2) always.
    """
    converted = []
    previous = "O"
    for tag in tags:
        converted.append("B" + tag[1:] if tag.startswith("I-") and previous[2:] != tag[2:] else tag)
        previous = tag
    return converted


def _to_bio(sentences: list[TaggedSentence]) -> list[TaggedSentence]:
    if not is_bio(sorted({tag for sentence in sentences for tag in sentence.tags})):
        return sentences
    return [TaggedSentence(sentence.words, iob1_to_bio(sentence.tags), sentence.where) for sentence in sentences]
