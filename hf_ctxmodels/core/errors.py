"""Errors that a user can fix, context managers that raise them, and the entry point that prints them."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# characters that are kept of the beginning and the end of a message, which may quote a file without line breaks
_HEAD_LENGTH, _TAIL_LENGTH = 1000, 2000


class CtxError(ValueError):
    """An error that the user can fix.

    Args:
        message: What was wrong, and what was expected.
        location: The file, line, step or argument.
        hint: How to fix it, an imperative sentence; printed after `Fix:`.
    """

    exit_code: int = 2

    def __init__(self, message: str, *, location: str | None = None, hint: str | None = None) -> None:
        message = _printable(message)
        lines = [message]
        if location:
            lines.append(f"  where: {_printable(location)}")
        if hint:
            lines.append(f"  Fix: {_printable(hint)}")
        super().__init__("\n".join(lines))
        self.message, self.location, self.hint = message, location, hint


@contextmanager
def wrap_errors(message: str, *, location: str | None = None, hint: str | None = None) -> Iterator[None]:
    """Convert any error of the `with` body, which reads a file, a configuration or weights, to a `CtxError`.

    Raises:
        CtxError: `message`, followed by the first line of the original error. A `CtxError` is passed on.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        raise CtxError(f"{message}: {describe_error(error)}.", location=location, hint=hint) from error


def describe_error(error: BaseException) -> str:
    """First line of an error's message, preceded by the class name unless the class adds no information."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    is_generic = isinstance(error, ValueError | RuntimeError) and not isinstance(error, UnicodeError | RecursionError)
    if message and is_generic:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run a script's `main` and exit: with 0 when it returns, with `exit_code` (2 by default) after a `CtxError`.

    A `CtxError`, a failed system call and an exhausted memory are printed to stderr without a traceback. An
    interruption exits with 130. Other exceptions are defects of the program and keep their tracebacks.
    """
    code = 0
    try:
        main()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        code = 130
    except Exception as error:
        user_error = error if isinstance(error, CtxError) else _system_error(error)
        if user_error is None:
            raise
        print(f"\n{type(user_error).__name__}: {user_error}", file=sys.stderr, flush=True)
        code = user_error.exit_code
    gc.collect()  # the traceback may refer to a data loader, whose workers would delay the exit
    sys.exit(code)


def _system_error(error: Exception) -> CtxError | None:
    """A failed system call or allocation as a `CtxError`; None for a defect of the program."""
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        location = " -> ".join(names) or None
        hint = "check the path, its permissions and the free disk space."
        return CtxError(f"{describe_error(error)}.", location=location, hint=hint)
    is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_out_of_memory or "can't allocate memory" in str(error):
        return CtxError(
            f"Out of memory: {describe_error(error)}.",
            hint="use a smaller batch (--per_device_batch_size, with more --gradient_accumulation_steps), a smaller "
            "model or shorter inputs.",
        )
    return None


def _printable(text: str) -> str:
    """Text of bounded length without lone surrogates, which terminals and logs reject."""
    if len(text) > _HEAD_LENGTH + _TAIL_LENGTH:
        text = f"{text[:_HEAD_LENGTH]} [...] {text[-_TAIL_LENGTH:]}"
    return text.encode("utf-8", "backslashreplace").decode()
