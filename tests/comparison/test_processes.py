"""Subprocesses: cost, failures, deadline."""

import sys
import time

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


def test_accelerate_launch_command():
    command = package_command("pretrain", "--resume", accelerate={"num_processes": "2"})
    assert command[1:] == [
        *("-m", "accelerate.commands.launch", "--num_processes", "2", "-m", "hf_ctxmodels", "pretrain", "--resume")
    ]
