"""Errors a user can mend, and the wrapper that shows them on one screen."""

import gc
import sys
from collections.abc import Callable
from typing import NoReturn


class CtxError(ValueError):
    """Something the user can mend: says what is wrong, where, and how to mend it.

    Args:
        what: what was wrong and what was expected.
        location: the file, line, step or argument concerned.
        hint: what to do about it.
    """

    exit_code: int = 2

    def __init__(self, what: str, *, location: str | None = None, hint: str | None = None) -> None:
        lines = [what]
        if location:
            lines.append(f"  where:   {location}")
        if hint:
            lines.append(f"  to mend: {hint}")
        super().__init__("\n".join(lines))
        self.what, self.location, self.hint = what, location, hint


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run a script's `main` and exit: 0 when it returns, the error's own code (2 by default) after a `CtxError`.

    A `CtxError` is printed on stderr without a traceback. Any other exception is a defect of the program and keeps its
    traceback.
    """
    code = 0
    try:
        main()
    except CtxError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    gc.collect()  # the error's traceback may hold a loader, whose workers the process would wait for
    sys.exit(code)
