"""Benchmark of the pretraining loop, and measurements on a busy machine."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from benchmarks import cases, pretraining, report
from benchmarks.clock import StepClock
from benchmarks.cpu_load import busy_core
from benchmarks.measure import Measurement
from benchmarks.settings import Settings

CPU = torch.device("cpu")
KILLED_PROGRAM = """
import os, signal
from benchmarks.cpu_load import busy_core

with busy_core():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_pretraining_loop_and_references_are_measured(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    sentences = ["the old cat sat on a mat. ", "a bird saw the red house under it. ", "then the dog ran by a tree. "]
    text.write_text("\n\n".join("".join(sentences[n % 3 :] * 3) for n in range(40)), encoding="utf-8")
    tiny_fields = {"layers": 1, "width": 64, "length": 32, "batch": 4, "config": {"vocab_size": 300}}
    monkeypatch.setattr(pretraining, "DATASET", str(text))
    monkeypatch.setattr(pretraining, "CASES", [replace(case, **tiny_fields) for case in pretraining.CASES])
    results = list(pretraining.run(Settings(repeats=1)))
    assert [min(result.model.cpu_seconds, result.reference.cpu_seconds) > 0 for result in results] == [True] * 3
    rows = report.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert all(row.count("µs/token") == 4 for row in rows[2:])


def test_busy_machine():
    """Busy cases have separate targets; the load process ends with the context or when the benchmark is killed."""
    case = replace(cases.CASES[0], min_speedup=1.0, busy_min_speedup=3.0)
    assert case.with_load(busy=False) == case
    busy_case = case.with_load(busy=True)
    assert (busy_case.min_speedup, busy_case.name) == (3.0, f"{case.name}, busy")
    with busy_core() as process_id:
        assert psutil.Process(process_id).is_running()
    assert not psutil.pid_exists(process_id)
    with pytest.raises(ZeroDivisionError), busy_core() as process_id:
        1 / 0  # noqa: B018
    assert not psutil.pid_exists(process_id)
    # The call returns when both processes have ended: the load process inherits the pipes.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", KILLED_PROGRAM], env=environment, capture_output=True, timeout=300)
    assert result.returncode == -signal.SIGKILL


def test_step_clock_measures_time_between_steps(monkeypatch):
    """Each step takes 10 s of wall-clock time and 3 s of CPU time."""
    now = {"perf_counter": 100.0, "process_time": 7.0}
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name])
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with StepClock(2, 5, CPU) as clock:
        for _ in range(7):
            now["perf_counter"] += 10
            now["process_time"] += 3
            optimizer.step()
    optimizer.step()
    assert clock.per_token(tokens=6) == (5.0, 1.5)


def test_measurement_medians_of_wall_and_cpu_time():
    times = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0)]
    assert Measurement.summarize(times, peak=4) == Measurement(2.0, 2.0, 1.0, 4)
    assert Measurement.summarize(times[:1]) == Measurement(3.0, 1.0, 0.0, 0)
