"""Status lines and progress bars that commands write to stderr."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def print_status(line: str, enabled: bool = True) -> None:
    """Print a line above any active progress bar."""
    if enabled:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


def progress_bar(items: Iterable[Item], description: str, *, unit: str, enabled: bool = True) -> Iterable[Item]:
    """Iterate over items, whose name in the plural is `unit`, with a progress bar if stderr is a terminal.

    `enabled` is False to hide the bar, as on all processes but the main one.
    """
    return tqdm(items, desc=description, unit=f" {unit}", leave=False, disable=None if enabled else True)


def format_next_commands(*commands: Sequence[object]) -> str:
    """Lines with commands to run next, each a sequence of a name and its flags."""
    return "next:\n" + "\n".join(f"  {shlex.join(['hf-ctxmodels', *map(str, command)])}" for command in commands)
