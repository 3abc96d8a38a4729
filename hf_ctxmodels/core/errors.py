"""Errors that a user can fix, and a context manager that raises them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# characters that are kept of the beginning and the end of a message, which may quote a file without line breaks
_HEAD_LENGTH, _TAIL_LENGTH = 1000, 2000


class CtxError(ValueError):
    """An error that the user can fix.

    Args:
        message: What was wrong, and what was expected.
        location: The file, line, step or argument; an object is converted to a string here.
        hint: How to fix it, an imperative sentence; printed after `Fix:`.
    """

    exit_code: int = 2

    def __init__(self, message: str, *, location: object = None, hint: str | None = None) -> None:
        message = _printable(message)
        location = None if location is None else str(location)
        lines = [message]
        if location:
            lines.append(f"  where: {_printable(location)}")
        if hint:
            lines.append(f"  Fix: {_printable(hint)}")
        super().__init__("\n".join(lines))
        self.message, self.location, self.hint = message, location, hint


@contextmanager
def wrap_errors(message: str, *, location: object = None, hint: str | None = None) -> Iterator[None]:
    """Convert any error of the `with` body, which reads a file, a configuration or weights, to a `CtxError`.

    Raises:
        CtxError: `message`, followed by the first line of the original error. A `CtxError` is passed on.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        hint = hint_for_error(error, hint)
        raise CtxError(f"{message}: {describe_error(error)}.", location=location, hint=hint) from error


def hint_for_error(error: Exception, default: str | None) -> str | None:
    """The hint for a file without permission, or the default for other errors."""
    return "check the permissions of the file." if isinstance(error, PermissionError) else default


def require_packages(*names: str, extra: str, location: str) -> None:
    """Raise CtxError if a package of an extra is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise CtxError(
            f"Not installed: {', '.join(missing)}.", location=location, hint=f"pip install 'hf_ctxmodels[{extra}]'."
        )


def describe_error(error: BaseException) -> str:
    """First line of an error's message, and the second one after a colon, preceded by the class name unless the class
    adds no information."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    message = " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")
    is_generic = isinstance(error, ValueError | RuntimeError) and not isinstance(error, UnicodeError | RecursionError)
    is_generic = is_generic or type(error) is Exception  # of libraries in Rust
    if message and is_generic:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _printable(text: str) -> str:
    """Text of bounded length without lone surrogates, which terminals and logs reject."""
    if len(text) > _HEAD_LENGTH + _TAIL_LENGTH:
        text = f"{text[:_HEAD_LENGTH]} [...] {text[-_TAIL_LENGTH:]}"
    return text.encode("utf-8", "backslashreplace").decode()
