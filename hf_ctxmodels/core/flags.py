"""How the dataclasses of the scripts declare their flags."""

from dataclasses import field
from typing import Any


def flag(default: object, explanation: str) -> Any:
    """A dataclass field with a default that `--help` explains; the default of a list is given as a tuple."""
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": explanation})
    return field(default=default, metadata={"help": explanation})
