"""What the demo shows: sections with the elapsed time, and numbers beside their baselines."""

import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100
_NAME = 44
_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}  # words stay whole


@dataclass(frozen=True)
class Result:
    """A number of this run beside those that it has to beat.

    Attributes:
        name: What was measured.
        value: What was measured.
        baselines: What gets by without what is shown -> its number.
        lower: Whether less is better, as with a loss.
        form: How numbers are written.
    """

    name: str
    value: float
    baselines: Mapping[str, float]
    lower: bool = False
    form: str = ".3f"

    @property
    def beats(self) -> bool:
        """Whether it is better than every baseline."""
        return all(self.value < each if self.lower else self.value > each for each in self.baselines.values())

    def __str__(self) -> str:
        others = ", ".join(f"{value:{self.form}} {name}" for name, value in self.baselines.items())
        return f"{self.name:<{_NAME}}{self.value:>8{self.form}}   {'beats' if self.beats else 'does not beat'} {others}"


class Screen:
    """Prints on standard output; on a terminal a line with the state of things is shown below, and replaced."""

    def __init__(self, sections: int) -> None:
        self._sections = sections
        self._section = 0
        self._start = time.perf_counter()
        self._live = sys.stdout.isatty()
        self.results: list[Result] = []

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start, as "1:05"."""
        minutes, seconds = divmod(round(time.perf_counter() - self._start), 60)
        return f"{minutes}:{seconds:02d}"

    def section(self, title: str) -> None:
        """Begin the next section."""
        self._section += 1
        head = f"[{self._section}/{self._sections}] {title}"
        self.line(f"\n{head:<{WIDTH - 8}}{self.elapsed:>8}", indent="")

    def line(self, text: str = "", indent: str = "  ") -> None:
        """Show a line."""
        self._clear()
        print(f"{indent}{text}" if text else "", flush=True)

    def text(self, text: str) -> None:
        """Show a paragraph."""
        for line in textwrap.wrap(text, WIDTH - 2, **_WHOLE):
            self.line(line)

    def command(self, *parts: object) -> None:
        """Show a command of the package as a user would type it."""
        line = f"$ hf-ctxmodels {shlex.join(map(str, parts))}"
        lines = textwrap.wrap(line, WIDTH - 6, subsequent_indent="      ", **_WHOLE)
        self.line(" \\\n  ".join(lines))

    def result(self, result: Result, meaning: str) -> None:
        """Show a number beside its baselines, and what it means."""
        self.results.append(result)
        self.line(str(result))
        for line in textwrap.wrap(meaning, WIDTH - 6, **_WHOLE):
            self.line(line, indent="      ")

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show rows of a name and a text."""
        width = max(len(name) for name, _ in rows) + 2
        for name, value in rows:
            self.line(f"{name:<{width}}{value}")

    def state(self, text: str) -> None:
        """Show how far something is, where it can be replaced by the next line."""
        if self._live:
            self._clear()
            print(f"  {text[: WIDTH - 2]}", end="\r", flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\033[K", end="")
