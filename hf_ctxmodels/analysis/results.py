"""Results of an analysis: tables, figures and numbers, saved as JSON, Markdown, SVG and PNG.

The JSON file holds everything; the others can be drawn from it. `analyze report` reads the JSON files of a directory.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

import hf_ctxmodels
from hf_ctxmodels.analysis.figures import Figure, can_write_png, format_value, plain, require_shape
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import file_digest
from hf_ctxmodels.core.output_files import replacing, write_text_file
from hf_ctxmodels.data.document_sources import document_files

FORMAT = "hf_ctxmodels analysis"
VERSION = 1


class PartialResults:
    """Results of an interrupted analysis, from which the same command continues.

    Args:
        file: JSON file.
        identity: JSON value that determines the results; a file with another identity is not used.
        data_files: Sources whose content the results depend on too: local files, patterns and directories. The content
            of others, such as datasets of the Hub, is not compared.

    Attributes:
        results: Sections of JSON values, empty without a file.
    """

    def __init__(self, file: str | Path, identity: object, data_files: Sequence[str | Path] = ()) -> None:
        digests = [file_digest(Path(file)) for file in document_files(map(str, data_files))]
        self.file, self.identity = Path(file), json.loads(json.dumps([identity, digests]))
        self.results: dict[str, Any] = {}
        self._last_save = time.monotonic()
        try:
            content = json.loads(self.file.read_text("utf-8"))
        except (OSError, ValueError):
            return
        if isinstance(content, dict) and content.get("identity") == self.identity:
            self.results = content["results"]
            print_status(f"Partial results are read from {self.file}")

    def save(self, min_interval: float = 0.0) -> None:
        """Write the file, unless it was written less than `min_interval` seconds ago."""
        if time.monotonic() - self._last_save >= min_interval:
            write_text_file(self.file, json.dumps({"identity": self.identity, "results": self.results}))
            self._last_save = time.monotonic()


def mean_and_std(values: ArrayLike) -> tuple[Any, Any]:
    """Mean and sample standard deviation over the first axis, such as seeds; a number each for numbers, else lists.

    Standard deviations are None for a single value.
    """
    array = np.asarray(values, dtype=np.float64)
    deviations = array.std(0, ddof=1) if len(array) > 1 else np.full(array.shape[1:], None)
    return array.mean(0).tolist(), deviations.tolist()


class NotAnAnalysisError(CtxError):
    """A JSON file is not the result of an analysis."""


@dataclass
class Table:
    """A table of numbers or texts.

    Args:
        title: One line.
        columns: Names of the columns, without a name for the column of row names.
        rows: Names of the rows; numbers become texts.
        cells: A list of numbers and texts for each row; None is an empty cell.
        spreads: Standard deviations of the cells, such as over seeds.
        best: Whether the highest or the lowest number of a column is the best one, which is shown in bold.
        digits: Digits of numbers that are not integers.
        note: Text below the table.
    """

    title: str
    columns: Sequence[Any]
    rows: Sequence[Any]
    cells: Sequence[Sequence[Any]]
    spreads: Sequence[Sequence[float | None]] | None = None
    best: Literal["max", "min"] | None = None
    digits: int = 3
    note: str = ""

    def __post_init__(self) -> None:
        self.columns, self.rows = [str(name) for name in self.columns], [str(name) for name in self.rows]
        self.cells = plain(self.cells)
        require_shape(f"Table {self.title!r}", self.cells, len(self.rows), len(self.columns))
        if self.spreads is not None:
            self.spreads = plain(self.spreads)
            require_shape(f"Spreads of the table {self.title!r}", self.spreads, len(self.rows), len(self.columns))
        if self.best not in ("max", "min", None):
            raise ValueError(f"The best value is the 'max' or the 'min', not {self.best!r}.")

    def text(self, row: int, column: int) -> str:
        """A cell as text, with its spread."""
        value = self.cells[row][column]
        if isinstance(value, str):
            return value
        spread = self.spreads[row][column] if self.spreads else None
        text = format_value(value, self.digits)
        return text if spread is None or value is None else f"{text} ± {spread:.{self.digits}f}"

    def is_best(self, row: int, column: int) -> bool:
        """Whether a cell holds the best number of its column, of at least two."""
        numbers = [cells[column] for cells in self.cells if isinstance(cells[column], int | float)]
        if self.best is None or len(numbers) < 2:
            return False
        return self.cells[row][column] == (max if self.best == "max" else min)(numbers)  # type: ignore[type-var]

    def markdown(self) -> str:
        """The table in Markdown, with best numbers in bold."""
        lines = [["", *map(_markdown_text, self.columns)], ["---", *["---:"] * len(self.columns)]]
        for row, name in enumerate(self.rows):
            texts = [_markdown_text(self.text(row, column)) for column in range(len(self.columns))]
            bold = [f"**{text}**" if self.is_best(row, column) else text for column, text in enumerate(texts)]
            lines.append([_markdown_text(name), *bold])
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{text}\n\n{_markdown_text(self.note)}" if self.note else text


@dataclass
class AnalysisResult:
    """Result of one analysis of one or several models.

    Args:
        analysis: Its name, which is the name of its files: letters, digits, `_` and `-`.
        models: Directories or Hub ids.
        settings: Arguments, data files with their numbers of examples, seeds.
        tables, figures: Content of the report, in this order.
        values: All numbers, for programs.
    """

    analysis: str
    models: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.analysis.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{self.analysis!r} is not a name of an analysis: letters, digits, '_' and '-'.")
        names = [figure.name for figure in self.figures]
        if len(set(names)) < len(names):
            raise ValueError(f"Figures of one analysis have different names, not {', '.join(names)}.")
        self.models, self.settings, self.values = list(self.models), plain(self.settings), plain(self.values)

    def save(self, directory: str | Path) -> None:
        """Write `<analysis>.json`, `<analysis>.md`, and `<analysis>-<figure>.svg` and `.png` for each figure.

        Existing files are replaced, each atomically and the JSON file last. Without the package resvg_py, no PNG is
        written.

        Raises:
            CtxError: A file cannot be written.
        """
        directory = Path(directory)
        for figure in self.figures:
            write_text_file(directory / f"{self.analysis}-{figure.name}.svg", figure.svg())
            if image := figure.png():
                with replacing(directory / f"{self.analysis}-{figure.name}.png") as temporary:
                    temporary.write_bytes(image)
        if self.figures and not can_write_png():
            print_status("Figures are saved as SVG; for PNG: pip install 'hf_ctxmodels[figures]'.")
        write_text_file(directory / f"{self.analysis}.md", self.markdown())
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        write_text_file(directory / f"{self.analysis}.json", text.encode("utf-8", "replace").decode())

    def markdown(self) -> str:
        """Tables and figures in Markdown, and the settings."""
        lines = [f"# {self.analysis}", f"Models: {', '.join(map(_markdown_text, self.models))}"]
        for table in self.tables:
            lines += [f"## {_markdown_text(table.title)}", table.markdown()]
        extension = "png" if can_write_png() else "svg"
        for figure in self.figures:
            lines += [f"## {_markdown_text(figure.title)}"]
            lines += [f"![{_markdown_text(figure.caption or figure.title)}]({self.analysis}-{figure.name}.{extension})"]
        settings = json.dumps(self.settings, ensure_ascii=False, indent=2)
        lines += ["## Settings", f"````json\n{settings}\n````"]
        return "\n\n".join(lines).encode("utf-8", "replace").decode() + "\n"

    def to_json(self) -> dict[str, Any]:
        """All fields, with the format and its version."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "hf_ctxmodels": hf_ctxmodels.__version__,
            "analysis": self.analysis,
            "models": self.models,
            "settings": self.settings,
            "tables": [vars(table) for table in self.tables],
            "figures": [figure.to_json() for figure in self.figures],
            "values": self.values,
        }

    @classmethod
    def load(cls, file: str | Path) -> "AnalysisResult":
        """Read a JSON file of `save`.

        Raises:
            CtxError: The file cannot be read, is damaged, is not a result, or has a version of a later release.
        """
        hint = "run the analysis again."
        with wrap_errors("Cannot read the result of an analysis", location=file, hint=hint):
            values = json.loads(Path(file).read_text("utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise NotAnAnalysisError(
                "The JSON file is not the result of an analysis.",
                location=file,
                hint="use a file of `hf-ctxmodels analyze`.",
            )
        if values.get("version") != VERSION:
            raise CtxError(
                f"The result has version {values.get('version')!r} of the format; this release reads {VERSION}.",
                location=file,
                hint="run the analysis again, or update hf_ctxmodels.",
            )
        with wrap_errors("The result of the analysis is damaged", location=file, hint=hint):
            return cls(
                values["analysis"],
                values["models"],
                values["settings"],
                [Table(**table) for table in values["tables"]],
                [Figure.from_json(figure) for figure in values["figures"]],
                values["values"],
            )


def _markdown_text(text: str) -> str:
    """Text of a line or a table cell, without markup of Markdown or HTML."""
    text = " ".join(str(text).split())
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text
