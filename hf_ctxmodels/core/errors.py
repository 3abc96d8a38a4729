"""Errors that users can fix, and the wrapper that prints them."""

import gc
import sys
from collections.abc import Callable
from typing import NoReturn


class CtxError(ValueError):
    """An error that the user can fix.

    Args:
        what: What was wrong, and what was expected.
        location: The file, line, step or argument.
        hint: How to fix it.
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
    """Run a script's `main` and exit: 0 when it returns, the error's `exit_code` (2 by default) after a `CtxError`.

    A `CtxError` is printed on stderr without a traceback; other exceptions keep theirs.
    """
    code = 0
    try:
        main()
    except CtxError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    gc.collect()  # the traceback may refer to a loader, whose workers would delay the exit
    sys.exit(code)
