"""How the dataclasses of the scripts declare their flags."""

from dataclasses import field
from typing import Any


def flag(default: object, explanation: str) -> Any:
    """A dataclass field with a default that `--help` explains."""
    return field(default=default, metadata={"help": explanation})
