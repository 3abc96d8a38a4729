"""Errors that users can fix, the boundaries that raise them, and the wrapper that prints them."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_HEAD, _TAIL = 1000, 2000  # characters of a message that are kept: what was read may be a file of one line


class CtxError(ValueError):
    """An error that the user can fix.

    Args:
        message: What was wrong, and what was expected.
        location: The file, line, step or argument.
        hint: How to fix it.
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
    """Within, something foreign is read: a file, a configuration, weights. Any error there is the fault of that.

    Raises:
        CtxError: In place of any error of another class: `message`, and what the error says.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        raise CtxError(f"{message}: {describe_error(error)}.", location=location, hint=hint) from error


def describe_error(error: BaseException) -> str:
    """The first line of what an error says, with its class where that is part of the meaning."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    plain = isinstance(error, ValueError | RuntimeError) and not isinstance(error, UnicodeError | RecursionError)
    return said if said and plain else f"{type(error).__name__}{': ' if said else ''}{said}"


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run a script's `main` and exit: 0 when it returns, the error's `exit_code` (2 by default) after a `CtxError`.

    A `CtxError` is printed on stderr without a traceback, and so is what the system refuses: a file, memory. An
    interruption exits with 130. Other exceptions are defects of the program and keep their tracebacks.
    """
    code = 0
    try:
        main()
    except CtxError as error:
        code = _report(error)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        code = 130
    except Exception as error:
        refused = _refusal(error)
        if refused is None:
            raise
        code = _report(refused)
    gc.collect()  # the traceback may refer to a loader, whose workers would delay the exit
    sys.exit(code)


def _report(error: CtxError) -> int:
    print(f"\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _refusal(error: Exception) -> CtxError | None:
    """What the system refused; None for a defect of the program."""
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        location = " -> ".join(names) or None
        return CtxError(
            f"{describe_error(error)}.", location=location, hint="see to the file, its rights and the disk."
        )
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):
        return CtxError(
            f"The memory is full: {describe_error(error)}.",
            hint="use a smaller batch (--per_device_batch_size, with more --gradient_accumulation_steps), a smaller "
            "model or shorter inputs.",
        )
    return None


def _printable(text: str) -> str:
    """Of bounded length, and without halves of surrogate pairs, which no terminal and no log takes."""
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} [...] {text[-_TAIL:]}"
    return text.encode("utf-8", "backslashreplace").decode()
