"""Declaration of command-line flags in dataclasses."""

from dataclasses import field
from typing import Any


def flag(default: object, explanation: str) -> Any:
    """A dataclass field with a default and a `--help` text; a tuple is the default of a list."""
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": explanation})
    return field(default=default, metadata={"help": explanation})
