"""What commands write to stderr: status lines, progress bars and errors."""

import gc
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from tqdm import tqdm

from hf_ctxmodels.core.errors import CtxError, describe_error

Item = TypeVar("Item")


def print_status(line: str, enabled: bool = True) -> None:
    """Print a line above any active progress bar."""
    if enabled:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


def progress_bar(items: Iterable[Item], description: str, *, unit: str, enabled: bool = True) -> Iterable[Item]:
    """Iterate over items, whose name in the plural is `unit`, with a progress bar if stderr is a terminal."""
    return tqdm(items, desc=description, unit=f" {unit}", leave=False, disable=None if enabled else True)


def format_next_commands(*commands: Sequence[object]) -> str:
    """Lines with commands to run next, each a sequence of a name and its flags."""
    return "next:\n" + "\n".join(f"  {shlex.join(['hf-ctxmodels', *map(str, command)])}" for command in commands)


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
