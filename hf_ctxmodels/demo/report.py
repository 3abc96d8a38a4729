"""Output of the demo: sections with the elapsed time, and results with their baselines."""

import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100
_NAME_WIDTH = 44
_KEEP_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class Result:
    """A measured value and the baselines to beat.

    Attributes:
        name: Name of the metric.
        value: Measured value.
        baselines: Name of a baseline -> its value.
        lower_is_better: Whether lower values are better, as for a loss.
        number_format: Format of the values.
    """

    name: str
    value: float
    baselines: Mapping[str, float]
    lower_is_better: bool = False
    number_format: str = ".3f"

    @property
    def beats_baselines(self) -> bool:
        """Whether the value is better than every baseline."""
        sign = -1 if self.lower_is_better else 1
        return all(sign * self.value > sign * baseline for baseline in self.baselines.values())

    def __str__(self) -> str:
        baselines = ", ".join(f"{value:{self.number_format}} {name}" for name, value in self.baselines.items())
        verb = "beats" if self.beats_baselines else "does not beat"
        return f"{self.name:<{_NAME_WIDTH}}{self.value:>8{self.number_format}}   {verb} {baselines}"


class DemoReport:
    """Prints to standard output; on a terminal, a status line below is updated in place."""

    def __init__(self, sections: int) -> None:
        self._sections = sections
        self._section = 0
        self._start = time.perf_counter()
        self._is_terminal = sys.stdout.isatty()
        self.results: list[Result] = []

    @property
    def elapsed(self) -> str:
        """Time since the start, for example "1:05"."""
        minutes, seconds = divmod(round(time.perf_counter() - self._start), 60)
        return f"{minutes}:{seconds:02d}"

    def section(self, title: str) -> None:
        """Print the title of the next section."""
        self._section += 1
        heading = f"[{self._section}/{self._sections}] {title}"
        self.line(f"\n{heading:<{WIDTH - 8}}{self.elapsed:>8}", indent="")

    def line(self, text: str = "", indent: str = "  ") -> None:
        """Print a line."""
        self._clear()
        print(f"{indent}{text}" if text else "", flush=True)

    def text(self, text: str) -> None:
        """Print a paragraph."""
        for line in textwrap.wrap(text, WIDTH - 2, **_KEEP_WORDS):
            self.line(line)

    def command(self, *arguments: object) -> None:
        """Print a command line of the package."""
        line = f"$ hf-ctxmodels {shlex.join(map(str, arguments))}"
        lines = textwrap.wrap(line, WIDTH - 6, subsequent_indent="      ", **_KEEP_WORDS)
        self.line(" \\\n  ".join(lines))

    def result(self, result: Result, explanation: str) -> None:
        """Print a result with its baselines and an explanation."""
        self.results.append(result)
        self.line(str(result))
        for line in textwrap.wrap(explanation, WIDTH - 6, **_KEEP_WORDS):
            self.line(line, indent="      ")

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table with two columns."""
        width = max(len(name) for name, _ in rows) + 2
        for name, value in rows:
            self.line(f"{name:<{width}}{value}")

    def status(self, text: str) -> None:
        """Show progress on a terminal; the next line replaces it."""
        if self._is_terminal:
            self._clear()
            print(f"  {text[: WIDTH - 2]}", end="\r", flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="")
