"""Files of text-to-text tasks -> rows of named fields.

`FORMATS` maps the `format` of a task to its reader; without a format, the suffix of the file decides:

- `tsv`, `csv`, `jsonl`, `parquet`: tables (`data.table_files`). Nested objects of records have dotted names,
  `target.span1_text`.
- `conll`, `conllu`: sentences; a field is the number or name of a column and has its cells, separated by spaces.
- `parallel`: two or more files of equally many lines; the field `1` is a line of the first file.
- `squad`: `question`, `context`, and `answers`, a list of distinct texts, empty if there is no answer.
- `record`: ReCoRD's queries (Zhang et al. 2018): `query`, `passage`, `entities` and `answers`, sorted distinct texts.
- `winograd`: JSON lines with a pronoun at the word `target.span2_index` (SuperGLUE's WSC) or the character
  `pronoun_start` (WSC273); the field `marked_text` has the pronoun between asterisks.
- `lambada`, `copa`, `wic`, `wsc273`: JSON lines with the fields of `benchmark_fields`; `cbt`: the Children's Book Test.
- `dpr`: blocks of the lines sentence, pronoun, two candidates and answer (Rahman & Ng 2012), separated by blank lines:
  `sentence`, `pronoun`, `candidates`, `answer` and `marked_text`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.record_files import read_records
from hf_ctxmodels.data.table_files import Row, line_blocks, read_conll, read_conllu, read_table
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.tasks.question_answering import read_squad
from hf_ctxmodels.downstream.text2text.benchmark_fields import BENCHMARK_FIELDS, Values, read_children_books

_HIGHLIGHT = "@highlight"


@dataclass(frozen=True)
class RowRequest:
    """What a reader needs to know of a task.

    Attributes:
        files: One file, or several of the format `parallel`.
        fields: The fields that the task's templates use.
        expand: Dotted name of a list in records, or of a list within a list; each of its items is a row.
        labeled: Whether rows need targets.
    """

    files: tuple[str, ...]
    fields: tuple[str, ...]
    expand: str = ""
    labeled: bool = True

    @property
    def file(self) -> str:
        """The only file; raises CtxError if there are several."""
        if len(self.files) != 1:
            raise CtxError(
                f"{len(self.files)} files, expected one.",
                location=", ".join(self.files),
                hint="set format: parallel, or use one file.",
            )
        return self.files[0]


def read_rows(request: RowRequest, format: str | None = None) -> list[Row]:
    """The rows of a file in file order; raises CtxError if it has none, cannot be read or lacks a field.

    Args:
        request: Files and fields.
        format: A key of `FORMATS`; None for the suffix of the file.
    """
    format = format or ("parallel" if len(request.files) > 1 else file_suffix(request.file).removeprefix("."))
    if request.expand and format not in ("jsonl", "parquet", "winograd"):
        raise CtxError(
            f"The format {format} has no lists to expand.", location=request.files[0], hint="remove `expand`."
        )
    format = "tsv" if format == "txt" else format
    if format not in FORMATS:
        raise CtxError(
            f"Unknown format: the suffix is {file_suffix(request.file)!r}.",
            location=request.file,
            hint=f"set format: in the task to one of {', '.join(FORMATS)}.",
        )
    rows = FORMATS[format](request)
    if not rows:
        raise CtxError("No examples.", location=request.files[0], hint="use a file with at least one example.")
    return rows


def _read_nested_records(request: RowRequest) -> list[Row]:
    path = request.expand.split(".") if request.expand else []
    rows = []
    for record, location in read_records(request.file):
        try:
            rows += [Row(values, str(location)) for values in _flatten(record, path)]
        except KeyError as error:
            raise CtxError(
                f"There is no object or list {error.args[0]!r} on the path expand: {request.expand}.",
                location=location,
                hint="correct `expand` in the task, or the line.",
            ) from error
    return rows


def _flatten(record: Mapping[str, Any], path: Sequence[str] = (), prefix: str = "") -> list[dict[str, Any]]:
    """Dotted names and values of a nested object, once for each item of the list at the end of a path."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        if path and key == path[0]:
            continue
        if isinstance(value, dict):
            values |= _flatten(value, (), f"{prefix}{key}.")[0]
        else:
            values[prefix + key] = value
    if not path:
        return [values]
    name = prefix + path[0]
    item = record.get(path[0])
    if not isinstance(item, dict | list):
        raise KeyError(name)
    rows = []
    for element in item if isinstance(item, list) else [item]:
        nested = _flatten(element, path[1:], f"{name}.") if isinstance(element, dict) else [{name: element}]
        rows += [values | fields for fields in nested]
    return rows


def _read_tagged(request: RowRequest, words: str) -> list[Row]:
    """Rows of a CoNLL file; `words` is the column of the words."""
    columns = [field for field in request.fields if field != words]
    is_numbered = words.isdecimal()
    if is_numbered and (invalid := [field for field in columns if not re.fullmatch(r"-?[1-9]\d*", field)]):
        raise CtxError(
            f"The field {invalid[0]!r} is not the number of a column.",
            location=request.file,
            hint="use {1} for the words and {2}, ... or {-1} for the tags.",
        )
    tagged = {
        column: read_conll(request.file, int(words), int(column))
        if is_numbered
        else read_conllu(request.file, words, column)
        for column in columns or [words]
    }
    return [
        Row(
            {words: " ".join(sentences[0].words)}
            | {column: " ".join(sentence.tags) for column, sentence in zip(tagged, sentences, strict=True)},
            sentences[0].location,
        )
        for sentences in zip(*tagged.values(), strict=True)
    ]


def _read_parallel(request: RowRequest) -> list[Row]:
    texts = [read_text(file).removesuffix("\n").split("\n") for file in request.files]
    if len({len(lines) for lines in texts}) > 1:
        raise CtxError(
            f"The files have {', '.join(str(len(lines)) for lines in texts)} lines.",
            location=", ".join(request.files),
            hint="align the files: line N of each file is the same sentence.",
        )
    return [
        Row({str(i): line.rstrip("\r") for i, line in enumerate(lines, 1)}, f"{request.files[0]}:{number}")
        for number, lines in enumerate(zip(*texts, strict=True), 1)
    ]


def _read_squad(request: RowRequest) -> list[Row]:
    return [
        Row(
            {
                "id": question.id,
                "question": question.question,
                "context": question.context,
                "answers": list(dict.fromkeys(text for _, text in question.answers)),
            },
            question.location,
        )
        for question in read_squad(request.file, has_answers=request.labeled)
    ]


def _read_record(request: RowRequest) -> list[Row]:
    rows = []
    for record, location in read_records(request.file):
        with wrap_errors("Not ReCoRD's JSON", location=location, hint="use SuperGLUE's files."):
            text, entities = record["passage"]["text"], record["passage"]["entities"]
            names = sorted({text[entity["start"] : entity["end"] + 1] for entity in entities})
            for query in record["qas"]:
                values = {
                    "query": query["query"],
                    "passage": _join_highlights(text),
                    "entities": names,
                    "answers": sorted({answer["text"] for answer in query.get("answers", [])}),
                }
                rows.append(Row(values, f"{location}, query {query['idx']}"))
    return rows


def _join_highlights(text: str) -> str:
    """A passage of ReCoRD with its `@highlight` lines as sentences."""
    sentences = [" ".join(line.split()) for line in text.split(_HIGHLIGHT)]
    return " ".join(
        sentence if re.search(r"[.?!\"']$", sentence) else f"{sentence}." for sentence in sentences if sentence
    )


def _read_winograd(request: RowRequest) -> list[Row]:
    return [Row(row.values | {"marked_text": _mark(row)}, row.location) for row in _read_nested_records(request)]


def _mark(row: Row) -> str:
    """The text of a Winograd schema with its pronoun between asterisks."""
    values = row.values
    with wrap_errors(
        "Not a Winograd schema", location=row.location, hint="write text, pronoun and pronoun_start, or WSC's JSON."
    ):
        text, pronoun = values["text"], values.get("pronoun") or values["target.span2_text"]
        if "pronoun_start" in values:
            start = int(values["pronoun_start"])
        else:
            words = [match.start() for match in re.finditer(r"\S+", text)]
            start = words[int(values["target.span2_index"])]
    # A few indices of WSC select a neighboring word.
    matches = re.finditer(rf"\b{re.escape(pronoun)}\b", text, re.IGNORECASE)
    position = min((match.start() for match in matches), key=lambda position: abs(position - start), default=None)
    if position is None:
        raise CtxError(
            f"The pronoun {pronoun!r} is not a word of the text.", location=row.location, hint="correct the line."
        )
    return _with_asterisks(text, position, len(pronoun))


def _with_asterisks(text: str, start: int, length: int) -> str:
    return f"{text[:start]}*{text[start : start + length]}*{text[start + length :]}"


def _read_dpr(request: RowRequest) -> list[Row]:
    rows = []
    for block in line_blocks(request.file):
        location = f"{request.file}:{block[0][0]}"
        lines = [line.strip() for _, line in block]
        candidates = [candidate.strip() for candidate in lines[2].split(",")] if len(lines) == 4 else []
        answers = [name for name in candidates if name.lower() == lines[3].lower()]
        # If the pronoun's form occurs several times, the first occurrence is the pronoun.
        match = re.search(rf"\b{re.escape(lines[1])}\b", lines[0], re.IGNORECASE) if len(lines) == 4 else None
        if len(candidates) != 2 or not answers or match is None:
            raise CtxError(
                f"Expected a sentence, its pronoun, two candidates and the correct one, got {' / '.join(lines)[:200]}.",
                location=location,
                hint="write four lines and a blank line.",
            )
        values = {"sentence": lines[0], "pronoun": lines[1], "candidates": candidates, "answer": answers[0]}
        rows.append(Row(values | {"marked_text": _with_asterisks(lines[0], match.start(), len(lines[1]))}, location))
    return rows


def _read_benchmark(request: RowRequest, add_fields: Callable[[Values], dict[str, Any]]) -> list[Row]:
    rows = []
    for row in _read_nested_records(request):
        with wrap_errors("A field is missing or invalid", location=row.location, hint="use another format."):
            rows.append(Row({**row.values, **add_fields(row.values)}, row.location))
    return rows


FORMATS: dict[str, Callable[[RowRequest], list[Row]]] = {
    "tsv": lambda request: read_table(request.file, request.fields, ".tsv"),
    "csv": lambda request: read_table(request.file, request.fields, ".csv"),
    "jsonl": _read_nested_records,
    "parquet": _read_nested_records,
    "conll": partial(_read_tagged, words="1"),
    "conllu": partial(_read_tagged, words="FORM"),
    "parallel": _read_parallel,
    "squad": _read_squad,
    "record": _read_record,
    "winograd": _read_winograd,
    "dpr": _read_dpr,
    "cbt": lambda request: read_children_books(request.file),
    **{name: partial(_read_benchmark, add_fields=add_fields) for name, add_fields in BENCHMARK_FIELDS.items()},
}
