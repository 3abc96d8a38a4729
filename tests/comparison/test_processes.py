"""Subprocesses: cost, failures, deadline."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.comparison import processes
from hf_ctxmodels.comparison.processes import TimeIsUpError, failure_line, package_command, run_command


def test_command_cost(tmp_path):
    program = "import time; block = bytearray(60_000_000); time.sleep(0.3); print(len(block))"
    cost = run_command([sys.executable, "-c", program], tmp_path / "logs" / "log")
    assert (tmp_path / "logs" / "log").read_text() == "60000000\n"
    assert cost.seconds >= 0.3
    assert 60e6 < cost.peak_bytes < 1e9


def test_memory_without_proc_is_resource_usage(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_peak_bytes", lambda pid: 0)
    cost = run_command([sys.executable, "-c", "block = bytearray(60_000_000)"], tmp_path / "log")
    assert cost.peak_bytes > 60e6


def test_failed_command_raises(tmp_path):
    with pytest.raises(CtxError, match=r"exit code 3:\nlast words") as error:
        run_command([sys.executable, "-c", "print('last words'); exit(3)"], tmp_path / "log")
    assert error.value.location == str(tmp_path / "log")


def test_failure_line_has_the_error_of_the_log(tmp_path):
    chained = "KeyError: 'text'\n\nThe above exception was the direct cause of ...\n\nCtxError: No text."
    for output, line in (
        ("CtxError: No text.\n  Fix: add text.", ": CtxError: No text."),
        ("last words", ""),
        (chained, ": CtxError: No text."),
    ):
        with pytest.raises(CtxError) as error:
            run_command([sys.executable, "-c", f"print({output!r}); exit(2)"], tmp_path / "log")
        assert failure_line(error.value) == f"The command failed with exit code 2{line}"


def test_command_is_stopped_at_deadline(tmp_path):
    """The command receives SIGTERM and may finish its work."""
    program = "import signal, time; signal.signal(15, lambda *_: (print('saved', flush=True), exit(1)))\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(TimeIsUpError):
        run_command([sys.executable, "-c", program], tmp_path / "log", deadline=time.monotonic() + 1)
    assert (tmp_path / "log").read_text() == "saved\n"
    assert time.monotonic() - start < 60
    # a command that exits successfully after SIGTERM has a cost
    program = "import signal, time; signal.signal(15, lambda *_: exit(0))\ntime.sleep(60)"
    cost = run_command([sys.executable, "-c", program], tmp_path / "log", deadline=time.monotonic() + 2)
    assert 2 <= cost.seconds < 60


TRAINING = """
import signal, sys, time
def stop(*received):
    open(sys.argv[1], "a").write("saved")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").write("started ")
time.sleep(30)
"""
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"


@contextmanager
def interruptions(error: type[BaseException], file: Path, number: int = 1) -> Iterator[None]:
    """Raise an error in the main thread when a file exists, `number` times in intervals of a second."""

    def raise_error(*received: object) -> None:
        raise error

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.05)
        for _ in range(number):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGALRM)

    previous_handler = signal.signal(signal.SIGALRM, raise_error)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, previous_handler)


@pytest.mark.parametrize("error", [TimeIsUpError, KeyboardInterrupt, SystemExit])
def test_subprocesses_of_command_are_stopped(tmp_path, error):
    """`accelerate launch` exits on SIGTERM without stopping the training process that it started."""
    file = tmp_path / "training"
    command = [sys.executable, "-c", LAUNCHER, TRAINING, file]
    if error is TimeIsUpError:
        with pytest.raises(TimeIsUpError):
            run_command(command, tmp_path / "log", deadline=time.monotonic() + 3)
    else:
        with interruptions(error, file), pytest.raises(error):
            run_command(command, tmp_path / "log")
    for _ in range(100):  # the launcher does not wait
        if file.read_text() == "started saved":
            break
        time.sleep(0.1)
    assert file.read_text() == "started saved"


def test_second_interruption_ends_command(tmp_path):
    """Training saves a checkpoint on the first SIGTERM only."""
    file = tmp_path / "pid"
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "for _ in range(300): time.sleep(0.1)"
    )
    with interruptions(KeyboardInterrupt, file, number=2), pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", program, file], tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_accelerate_launch_command():
    command = package_command("pretrain", "--resume", accelerate={"num_processes": "2"})
    assert command[1:] == [
        *("-m", "accelerate.commands.launch", "--num_processes", "2", "-m", "hf_ctxmodels", "pretrain", "--resume")
    ]
