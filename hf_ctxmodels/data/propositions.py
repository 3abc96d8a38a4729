"""Files of semantic roles -> propositions: a predicate of a sentence and its arguments as BIO tags.

Files may be compressed (`.gz` or `.zst`), or URLs:

- columns as in CoNLL-2005: one word per line, the roleset of the word, or `-` or `_`, and then one column per predicate
  of the sentence, in the order of the predicates, with brackets such as `(ARG0*`, `*)` and `(V*)`;
- `.conllu`: such columns after CoNLL-U columns, with a role at the head word of each argument, and `_` at other words
  (Universal Propositions 1.0, Akbik et al. 2015); `A0` and `AM-TMP` are read as `ARG0` and `ARGM-TMP`;
- `.jsonl`: a list of words, the index of the predicate (from 0), and a list of BIO tags.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.record_files import has_records, read_records
from hf_ctxmodels.data.table_files import TaggedSentence, iob1_to_bio, line_blocks, parse_strings, split_cells

_OLD_ROLE = re.compile(r"(?<![^-])A(?=[\dAM](?:-|$))")  # as in CoNLL-2005: A0, AM-TMP, R-A1
_BRACKET = re.compile(r"(?:\(([^()*\s]+))?\*(?:[^()*\s]*(\)))?")


@dataclass(frozen=True)
class Proposition(TaggedSentence):
    """A sentence with the tags of the arguments of one predicate.

    Attributes:
        predicate: Index of the predicate's word.
        roleset: Sense of the predicate, such as `give.01`; "" if the file has none.
    """

    predicate: int
    roleset: str = ""


def read_propositions(
    file: str | Path, word_column: str, column: str, *, head_column: int | None = None, labeled: bool = True
) -> list[Proposition]:
    """The propositions of a file; sentences without predicates have none.

    Args:
        word_column: Number of the column of the words (1 is the first), or key of the list of words.
        column: Number of the column of the rolesets, or key of the list of tags; the key of the predicate is
            `predicate`.
        head_column: Number of the column of the syntactic heads (0 for the root); each argument is reduced to its head
            word, the first word whose head is outside (as in CoNLL-2009), and continuations are left out.
        labeled: Whether the arguments are read; else all tags are `O`.

    Raises:
        CtxError: The file has no propositions, or an invalid line.
    """
    if has_records(file):
        if head_column is not None:
            raise CtxError(
                "JSON lines have no columns of heads.", location="--head_column", hint="remove it, or use columns."
            )
        propositions = _read_json(file, word_column, column, labeled)
    else:
        columns = column_numbers(word_column, column, file)
        propositions = [
            proposition
            for block in line_blocks(file)
            for proposition in _read_columns(block, *columns, head_column, labeled, str(file))
        ]
    if not propositions:
        raise CtxError("No predicates.", location=str(file), hint="set --label_column to the column of the rolesets.")
    return propositions


def column_numbers(word_column: str, roleset_column: str, file: str | Path) -> tuple[int, int]:
    """The numbers of the columns of the words and of the rolesets; raises CtxError for a name or 0."""
    if not all(column.isdecimal() and int(column) for column in (word_column, roleset_column)):
        raise CtxError(
            f"Columns have numbers, not names; got {word_column!r} and {roleset_column!r}.",
            location=str(file),
            hint="pass --text_columns (words) and --label_column (rolesets) as numbers, 1 is the first.",
        )
    return int(word_column), int(roleset_column)


def _read_columns(
    block: Sequence[tuple[int, str]],
    word_column: int,
    roleset_column: int,
    head_column: int | None,
    labeled: bool,
    file: str,
) -> list[Proposition]:
    lines = list(dropwhile(lambda numbered: numbered[1].startswith("#") and "\t" not in numbered[1], block))
    has_head_words = file_suffix(file) == ".conllu"
    if has_head_words:
        lines = [(number, line) for number, line in lines if line.partition("\t")[0].isdecimal()]
    delimiter = "\t" if lines and "\t" in lines[0][1] else None
    rows = [split_cells(line, delimiter) for _, line in lines]
    predicates = [
        index for index, row in enumerate(rows) if row[roleset_column - 1 : roleset_column] not in ([], ["-"], ["_"])
    ]
    width = roleset_column + len(predicates)
    propositions = []
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) < max(word_column, roleset_column) or (labeled and len(row) != width):
            raise CtxError(
                f"{len(row)} column(s), expected {width}: {roleset_column} and one for each of the sentence's "
                f"{len(predicates)} predicates.",
                location=f"{file}:{number}",
                hint="correct the line, or set --text_columns (words) and --label_column (rolesets).",
            )
    words = [row[word_column - 1] for row in rows]
    for index, predicate in enumerate(predicates):
        location = f"{file}:{lines[predicate][0]}"
        tags = ["O"] * len(words)
        if labeled:
            cells = [row[roleset_column + index] for row in rows]
            tags = _head_word_tags(cells) if has_head_words else _bracket_tags(cells, location)
            if head_column is not None:
                tags = _reduce_to_heads(tags, [row[head_column - 1 : head_column] for row in rows], location)
            if has_head_words or head_column is not None:
                tags[predicate] = "B-V"
        propositions.append(Proposition(words, tags, location, predicate, rows[predicate][roleset_column - 1]))
    return propositions


def _head_word_tags(cells: Sequence[str]) -> list[str]:
    """BIO tags of a column with a role at the head word of each argument."""
    return ["O" if cell in ("_", "-") else "B-" + _OLD_ROLE.sub("ARG", cell) for cell in cells]


def _reduce_to_heads(tags: Sequence[str], head_cells: Sequence[list[str]], location: str) -> list[str]:
    """Tags of the head words of arguments alone; see `read_propositions`."""
    if not all(cells and cells[0].isdecimal() for cells in head_cells):
        raise CtxError(
            "Expected the number of a word, or 0, as the head of each word.",
            location=location,
            hint="set --head_column to the column of the syntactic heads.",
        )
    heads = [int(number) - 1 for (number,) in head_cells]
    reduced = ["O"] * len(tags)
    starts = [index for index, tag in enumerate(tags) if tag[0] == "B"]
    for start in starts:
        label = tags[start][2:]
        stop = start + 1
        while stop < len(tags) and tags[stop] == f"I-{label}":
            stop += 1
        if label != "V" and not label.startswith("C-"):
            outside = (index for index in range(start, stop) if not start <= heads[index] < stop)
            reduced[next(outside, start)] = f"B-{label}"
    return reduced


def _bracket_tags(cells: Sequence[str], location: str) -> list[str]:
    """BIO tags of a column such as `(ARG0*`, `*`, `*)`."""
    tags: list[str] = []
    label = None
    for cell in map(str.strip, cells):
        if cell == "*":
            tags.append("O" if label is None else f"I-{label}")
            continue
        match = _BRACKET.fullmatch(cell)
        if match is None or (match[1] and label) or (match[2] and not (match[1] or label)):
            raise CtxError(
                f"{cell!r} does not open or close an argument here.",
                location=location,
                hint="write (LABEL* at the first word of an argument and *) at the last, without nested arguments.",
            )
        label = match[1] or label
        tags.append(f"{'B' if match[1] else 'I'}-{label}")
        label = None if match[2] else label
    if label is not None:
        raise CtxError(f"The argument {label} is not closed.", location=location, hint="write *) at its last word.")
    return tags


def _read_json(file: str | Path, word_column: str, tag_column: str, labeled: bool) -> list[Proposition]:
    propositions = []
    for record, location in read_records(file):
        words = parse_strings(record.get(word_column))
        tags = parse_strings(record.get(tag_column)) if labeled else ["O"] * len(words)
        predicate: Any = record.get("predicate")
        if not len(words) == len(tags) > 0 or type(predicate) is not int or not 0 <= predicate < len(words):
            raise CtxError(
                f"Expected words as {word_column!r}, the index of a word as 'predicate'"
                + (f", and a tag for each word as {tag_column!r}." if labeled else "."),
                location=str(location),
                hint="correct the line, or set --text_columns and --label_column to other keys.",
            )
        if not is_bio(tags) or iob1_to_bio(tags) != tags:
            raise CtxError(
                f"The tags are not BIO: {' '.join(tags)}.",
                location=str(location),
                hint="write B-LABEL at the first word of an argument, I-LABEL at the next words, and O elsewhere.",
            )
        propositions.append(Proposition(words, tags, str(location), predicate))
    return propositions
