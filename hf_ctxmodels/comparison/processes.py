"""Subprocesses of a comparison."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hf_ctxmodels.core.errors import CtxError

_POLL_INTERVAL = 0.2  # seconds
_NUM_LOG_LINES = 12


class TimeIsUpError(Exception):
    """The time limit of the comparison has passed; the same command continues it."""


class ProcessCost(NamedTuple):
    """Duration in seconds, and highest resident memory in bytes, of a process."""

    seconds: float
    peak_bytes: int


def package_command(*arguments: object, accelerate: Mapping[str, str] | None = None) -> list[str]:
    """The command line of a command of the package; `accelerate`: flags of `accelerate launch` to start it with."""
    launcher: list[str] = []
    if accelerate is not None:
        launcher = ["-m", "accelerate.commands.launch"]
        launcher += [word for name, value in accelerate.items() for word in (f"--{name}", value)]
    return [sys.executable, *launcher, "-m", "hf_ctxmodels", *map(str, arguments)]


def device_flags(device: str | None) -> list[str]:
    """Flags of a command for a device; none for the default device."""
    return [] if device is None else ["--device", device]


def run_command(command: list[str], log: Path, deadline: float | None = None) -> ProcessCost:
    """Run a command with its output in a log file.

    Args:
        deadline: Time (`time.monotonic`) at which SIGTERM is sent; training then saves a checkpoint and stops. An
            interruption of this process does the same.

    Raises:
        CtxError: The command failed.
        TimeIsUpError: It stopped at the deadline without finishing.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as output:
        # a new session: Ctrl-C does not reach the command directly, `_terminate` signals all of its processes
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        is_stopped, peak_bytes = False, 0
        try:
            while not (result := os.wait4(process.pid, os.WNOHANG))[0]:
                peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
                if deadline is not None and time.monotonic() > deadline and not is_stopped:
                    os.killpg(process.pid, signal.SIGTERM)
                    is_stopped = True
                time.sleep(_POLL_INTERVAL)
        except BaseException:
            _terminate(process)
            raise
    _, status, usage = result
    process.returncode = os.waitstatus_to_exitcode(status)
    if is_stopped and process.returncode:
        raise TimeIsUpError
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LOG_LINES:]
        raise CtxError(
            f"The command failed with exit code {process.returncode}:\n" + "\n".join(lines),
            location=str(log),
            hint="fix the error above and start the comparison again; it continues from here.",
        )
    if not peak_bytes:
        peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return ProcessCost(time.monotonic() - start, peak_bytes)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a command and its subprocesses, and wait for the end of the command; another interruption sends
    SIGTERM again, on which training stops without saving.

    `accelerate launch` does not forward SIGTERM, and ends before the training of a single process has saved."""
    while process.poll() is None:
        with suppress(KeyboardInterrupt, SystemExit):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def failure_line(error: CtxError) -> str:
    """The first line of an error, followed by the last error in the log of a failed command; in a traceback of several
    exceptions, the earlier ones are its causes."""
    first_line, *log_lines = error.message.splitlines()
    errors = [line for line in log_lines if "Error: " in line]
    return f"{first_line} {errors[-1]}" if errors else first_line.rstrip(":")


def _peak_bytes(pid: int) -> int:
    """Highest resident memory of a running process so far; 0 if the system has no `/proc`. On Linux `ru_maxrss` is of
    no use here, since it is at least the memory of the process that started the command."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
