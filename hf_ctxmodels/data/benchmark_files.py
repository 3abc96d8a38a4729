"""Examples of evaluation data as texts, and files with some of the examples in the same format."""

import io
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import parse_json
from hf_ctxmodels.core.output_files import replacing, write_compressed
from hf_ctxmodels.data.files import DataFile, compression_suffix, file_name, file_suffix
from hf_ctxmodels.data.hub_datasets import is_dataset
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.data.text_files import Separator, guess_separator, read_text

_SQUAD_HINT = "use a file in SQuAD format, or a table (.csv, .tsv, .jsonl)."


@dataclass(frozen=True)
class BenchmarkExample:
    """The texts of an example, and its location (`file:line`, or the paragraph of a SQuAD file)."""

    texts: tuple[str, ...]
    location: str


@dataclass(frozen=True)
class BenchmarkFile:
    """The examples of a file of evaluation data.

    Attributes:
        select: Returns the content of a file of the same format with the examples of these numbers.
    """

    path: str
    examples: Sequence[BenchmarkExample]
    select: Callable[[Collection[int]], str]

    @property
    def name(self) -> str:
        """File name."""
        return file_name(self.path)

    def write(self, file: str | Path, numbers: Collection[int]) -> None:
        """Write some of the examples atomically, compressed as the original."""
        with replacing(file) as temporary, write_compressed(temporary, compression_suffix(self.path)) as output:
            output.write(self.select(numbers).encode())


def read_benchmark(path: str, columns: Sequence[str] = ("text",), separator: Separator | None = None) -> BenchmarkFile:
    """Read a file of evaluation data, plain or with `.gz` or `.zst`.

    - Tables (`.csv`, `.tsv`, `.jsonl`, and `.txt` with a header): each row is an example, and each of the columns, or
      each string within a list or object, is a text.
    - `.json` in SQuAD format: each paragraph is an example; its context and its questions are texts.
    - Other `.txt`: each line or block of lines is an example, see `guess_separator`.

    Raises:
        CtxError: The file is missing, has another format or no examples, or lacks a column.
    """
    suffix = file_suffix(path)
    if suffix == ".parquet" or is_dataset(path):
        raise CtxError(
            "Expected a text file: the examples without overlap are written as lines of the same format.",
            location=path,
            hint="convert it to JSON lines, for example with `to_json` of datasets.",
        )
    text = read_text(path)
    if suffix == ".json":
        return _read_squad(path, text)
    if suffix == ".txt" and not set(columns) <= set(text.partition("\n")[0].rstrip("\r").split("\t")):
        separator = separator or guess_separator([DataFile(path, None)])
        lines = io.StringIO(text, newline="\n").readlines()
        starts = list(_block_starts(lines, separator))
        blocks = [lines[start:stop] for start, stop in pairwise([*starts, len(lines)])]
        examples = [BenchmarkExample((" ".join(block),), f"{path}:{start + 1}") for start, block in zip(starts, blocks)]
        return BenchmarkFile(path, examples, _LineSelection(lines, starts))
    rows = read_table(path, columns)
    lines = io.StringIO(text, newline="\n" if suffix == ".jsonl" else "").readlines()
    starts = [int(row.location.rpartition(":")[2]) - 1 for row in rows]
    examples = [BenchmarkExample(tuple(_strings(list(row.values.values()))), row.location) for row in rows]
    return BenchmarkFile(path, examples, _LineSelection(lines, starts))


@dataclass(frozen=True)
class _LineSelection:
    """Selects examples that are consecutive lines, the first of which are `starts`; other lines before are a header."""

    lines: list[str]
    starts: list[int]

    def __call__(self, numbers: Collection[int]) -> str:
        selected = set(numbers)
        spans = enumerate(pairwise([*self.starts, len(self.lines)]))
        blocks = (self.lines[start:stop] for number, (start, stop) in spans if number in selected)
        return "".join([*self.lines[: self.starts[0]], *(line for block in blocks for line in block)])


def _block_starts(lines: Sequence[str], separator: Separator) -> Iterator[int]:
    """The first lines of the examples of a text file."""
    follows_text = False
    for number, line in enumerate(lines):
        is_blank = not line.strip()
        if not is_blank and not follows_text:
            yield number
        follows_text = (separator == "file" and follows_text) or (separator != "line" and not is_blank)


def _strings(value: Any) -> Iterator[str]:
    """The strings within a value of a table."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
    elif value is not None:
        yield str(value)


def _read_squad(path: str, text: str) -> BenchmarkFile:
    content = parse_json(text, location=path, hint=_SQUAD_HINT)
    examples = []
    with wrap_errors("Not SQuAD's JSON", location=path, hint=_SQUAD_HINT):
        for article_number, article in enumerate(content["data"]):
            for number, paragraph in enumerate(article["paragraphs"]):
                texts = (paragraph["context"], *(entry["question"] for entry in paragraph["qas"]))
                location = f"{path}, paragraph {number} of article {article_number}"
                examples.append(BenchmarkExample(tuple(map(str, texts)), location))
    if not examples:
        raise CtxError("The file has no paragraphs.", location=path, hint=_SQUAD_HINT)

    def select(numbers: Collection[int]) -> str:
        selected, first, articles = set(numbers), 0, []
        for article in content["data"]:
            paragraphs = article["paragraphs"]
            selected_paragraphs = [
                paragraph for number, paragraph in enumerate(paragraphs, first) if number in selected
            ]
            first += len(paragraphs)
            if selected_paragraphs:
                articles.append({**article, "paragraphs": selected_paragraphs})
        return json.dumps({**content, "data": articles}, ensure_ascii=False) + "\n"

    return BenchmarkFile(path, examples, select)
