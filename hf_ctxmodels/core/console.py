"""Status lines and progress bars that commands write to stderr."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def print_status(line: str, enabled: bool = True) -> None:
    """Show a line; a bar that is drawn stays below it."""
    if enabled:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


def progress_bar(
    items: Iterable[Item], description: str, *, unit: str, total: int | None = None, enabled: bool = True
) -> Iterable[Item]:
    """The items, with a bar while they are read, if stderr is a terminal.

    Args:
        items: Of any number.
        description: Before the bar.
        unit: Name of an item in the plural.
        total: Their number; by default that of `items` where it has one.
        enabled: False for no bar, as on all processes but the main one.
    """
    return tqdm(items, desc=description, unit=f" {unit}", total=total, leave=False, disable=None if enabled else True)


def format_next_commands(*commands: Sequence[object]) -> str:
    """Lines with commands to run next, each given as its name and flags."""
    return "next:\n" + "\n".join(f"  {shlex.join(['hf-ctxmodels', *map(str, command)])}" for command in commands)
