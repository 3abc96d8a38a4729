"""JSON that somebody else wrote: read, checked, or refused by a `CtxError`."""

import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.errors import CtxError, wrap_errors


def parse_json(text: str, *, location: str, hint: str = "write JSON.") -> Any:
    """The value of a JSON text.

    Raises:
        CtxError: It is no JSON, is nested too deeply, has a number of thousands of digits, or has a string with half of
            a surrogate pair, which is no character and cannot be written anywhere.
    """
    with wrap_errors("Not JSON that can be read", location=location, hint=hint):
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(file: str | Path, *, hint: str = "write JSON.") -> Any:
    """The value of a JSON file.

    Raises:
        CtxError: It cannot be opened, is not UTF-8, or as `parse_json`.
    """
    with wrap_errors("The file cannot be read", location=str(file), hint=hint):
        text = Path(file).read_text(encoding="utf-8")
    return parse_json(text, location=str(file), hint=hint)


def matches_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a type as annotations write it: `int`, `dict[str, float]`, `list[str] | None`,
    `Literal["a", "b"]`; a tuple of equal entries in place of a list.

    An integer is a float too; a bool is no number.
    """
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(matches_type(each, arguments[1]) for each in value.values())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(matches_type(each, arguments[0]) for each in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is hint or (hint in (None, type(None)) and value is None)


def check_json_type(value: Any, hint: Any, *, location: str, what: str) -> None:
    """Raise CtxError unless a value is of a type (see `matches_type`).

    Args:
        value: From JSON.
        hint: A type, or a mapping of the keys of an object to their types; others are refused.
        location: The file.
        what: What it is said to be.
    """
    if not isinstance(hint, dict):
        wrong = [] if matches_type(value, hint) else [f"{type(value).__name__}, expected {hint}"]
    elif isinstance(value, dict):
        unknown = [f"an unknown entry {name!r}" for name in value if name not in hint]
        wrong = unknown or [
            f"{name} is {str(entry)[:80]!r}, expected {hint[name]}"
            for name, entry in value.items()
            if not matches_type(entry, hint[name])
        ]
    else:
        wrong = [f"{type(value).__name__}, expected an object"]
    if wrong:
        raise CtxError(f"Not {what}: {wrong[0]}.", location=location, hint="copy the file again, or write it anew.")
