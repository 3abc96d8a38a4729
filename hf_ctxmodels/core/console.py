"""What commands write to stderr: status lines, progress bars and errors; and the format of numbers."""

import gc
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from typing import NoReturn, TypeVar

from tqdm import tqdm

from hf_ctxmodels.core.errors import CtxError, describe_error

Item = TypeVar("Item")
LINE_INTERVALS = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds between lines of progress, where there is no terminal."""


def format_number(value: float) -> str:
    """Three significant digits with a prefix of the SI from 1,000 on: 1_031_234 -> "1.03 M"."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    text = tqdm.format_sizeof(value)
    return f"{text[:-1]} {text[-1]}"


def format_count(number: int, noun: str) -> str:
    """A number and its noun, with an s unless the number is 1: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ReportTimer:
    """Tells when to report progress: after each of the intervals, in seconds, of which the last one repeats."""

    def __init__(self, *intervals: float) -> None:
        self._intervals = list(intervals)
        self.restart()

    def restart(self) -> None:
        """Start the next interval, after a report."""
        interval = self._intervals.pop(0) if len(self._intervals) > 1 else self._intervals[0]
        self._due = time.perf_counter() + interval

    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return time.perf_counter() >= self._due


def is_main_process() -> bool:
    """Whether this is the only or the first process of a launcher, before `accelerate` is initialized."""
    return os.environ.get("RANK", "0") == "0"


def print_status(line: str, enabled: bool = True) -> None:
    """Print a line above any active progress bar."""
    if enabled:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


def progress_bar(
    items: Iterable[Item], description: str, *, unit: str, total: int | None = None, enabled: bool = True
) -> Iterable[Item]:
    """Iterate over items, whose name in the plural is `unit`, with a progress bar; if stderr is not a terminal, with
    lines at growing intervals. `total` is the number of items, by default their length if they have one."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    if enabled and not sys.stderr.isatty():
        return _with_lines(items, description, unit, total)
    return tqdm(items, desc=description, unit=f" {unit}", total=total, leave=False, disable=not enabled)


def _with_lines(items: Iterable[Item], description: str, unit: str, total: int | None) -> Iterator[Item]:
    timer, suffix = ReportTimer(*LINE_INTERVALS), "" if total is None else f" of {total:,}"
    for number, item in enumerate(items, 1):
        yield item
        if timer.is_due():
            print_status(f"{description}: {number:,}{suffix} {unit}")
            timer.restart()


def format_next_commands(*commands: Sequence[object]) -> str:
    """Lines with commands to run next, each a sequence of a name and its flags."""
    return "next:\n" + "\n".join(f"  {shlex.join(['hf-ctxmodels', *map(str, command)])}" for command in commands)


def stop_signals() -> list[signal.Signals]:
    """The signals that end a command: SIGTERM, and SIGHUP when its terminal is closed, which Windows does not have."""
    return [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run a script's `main` and exit: with 0 when it returns, with `exit_code` (2 by default) after a `CtxError`.

    A `CtxError`, a failed system call, an exhausted memory and an operation that cannot be deterministic are printed to
    stderr without a traceback. An interruption exits with 130, and an output that is closed, as by `| head`, with 141
    and no message. Other exceptions are defects of the program and keep their tracebacks.
    """
    code = 0
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        code = 130
    except Exception as error:
        user_error = error if isinstance(error, CtxError) else _system_error(error)
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the output is flushed again at exit
            code = 141  # 128 + SIGPIPE, as in a shell
        elif user_error is None:
            raise
        else:
            print(f"\n{type(user_error).__name__}: {user_error}", file=sys.stderr, flush=True)
            code = user_error.exit_code
    with suppress(KeyboardInterrupt):  # a second one, or after the end
        gc.collect()  # the traceback may refer to a data loader, whose workers would delay the exit
    sys.exit(code)


def _is_output_closed() -> bool:
    """Whether stdout is a pipe whose reader has closed it; False without `select.poll`, as on Windows."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _system_error(error: Exception) -> CtxError | None:
    """A failed system call or allocation, or an operation that is not deterministic, as a `CtxError`; None for a defect
    of the program."""
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
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
        return CtxError(f"{describe_error(error).partition(', but')[0]}.", hint="remove --deterministic.")
    return None
