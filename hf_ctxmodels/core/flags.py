"""Declaration of command-line flags in dataclasses."""

from collections.abc import Collection, Iterable
from dataclasses import MISSING, field, fields
from typing import Any

from hf_ctxmodels.core.errors import CtxError


def flag(default: object, explanation: str) -> Any:
    """A dataclass field with a default and a `--help` text; a tuple is the default of a list."""
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": explanation})
    return field(default=default, metadata={"help": explanation})


def non_default_fields(arguments: Any) -> set[str]:
    """Names of the fields of a dataclass of flags that have another value than their default."""
    found = set()
    for each in fields(arguments):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found |= {each.name} if getattr(arguments, each.name) != default else set()
    return found


def check_choice(known: Collection[object], **values: object) -> None:
    """Raise CtxError if one of the values is none of the known ones."""
    for name, value in values.items():
        if value not in known:
            raise CtxError(f"{name}={value!r} is unknown.", hint=f"use one of: {', '.join(map(str, known))}.")


def reject_flag_conflicts(rules: Iterable[tuple[object, str, str]], hint: str) -> None:
    """Raise CtxError for the first rule that is broken.

    Args:
        rules: Whether it is broken, the flags, and what is wrong with them.
        hint: How to mend it.
    """
    for broken, location, what in rules:
        if broken:
            raise CtxError(what, location=location, hint=hint)
