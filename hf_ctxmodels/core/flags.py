"""Declaration and validation of command-line flags in dataclasses."""

from collections.abc import Collection, Iterable
from dataclasses import MISSING, field, fields
from typing import Any

from hf_ctxmodels.core.errors import CtxError


def flag(default: object, explanation: str) -> Any:
    """A dataclass field with a default and a `--help` text; a tuple becomes the default of a list."""
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": explanation})
    return field(default=default, metadata={"help": explanation})


def non_default_fields(arguments: Any) -> set[str]:
    """Names of the fields of a dataclass of flags whose values differ from their defaults."""
    names = set()
    for argument in fields(arguments):
        default = argument.default if argument.default_factory is MISSING else argument.default_factory()
        if getattr(arguments, argument.name) != default:
            names.add(argument.name)
    return names


def check_choice(choices: Collection[object], **values: object) -> None:
    """Raise CtxError if one of the values is not among the choices."""
    for name, value in values.items():
        if value not in choices:
            raise CtxError(f"{name}={value!r} is unknown.", hint=f"use one of: {', '.join(map(str, choices))}.")


def reject_flag_conflicts(rules: Iterable[tuple[object, str, str]], hint: str) -> None:
    """Raise CtxError for the first violated rule.

    Args:
        rules: Whether the rule is violated, the flags, and the message.
        hint: How to fix it.
    """
    for is_violated, location, message in rules:
        if is_violated:
            raise CtxError(message, location=location, hint=hint)
