"""`pretrain.py` beside its peers, and a machine that is busy meanwhile."""

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
from benchmarks.load import busy_core
from benchmarks.measure import Measurement

CPU = torch.device("cpu")
KILLED = """
import os, signal
from benchmarks.load import busy_core

with busy_core():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_both_peers_train_the_same_text(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    sentences = ["the old cat sat on a mat. ", "a bird saw the red house under it. ", "then the dog ran by a tree. "]
    text.write_text("\n\n".join("".join(sentences[n % 3 :] * 3) for n in range(40)), encoding="utf-8")
    small = {"layers": 1, "width": 64, "length": 32, "batch": 4, "config": {"vocab_size": 100}}
    monkeypatch.setattr(pretraining, "DATASET", str(text))
    monkeypatch.setattr(pretraining, "CASES", [replace(case, **small) for case in pretraining.CASES])
    quiet = list(pretraining.run(CPU, torch.float32, repeats=1, attention="sdpa"))
    assert [min(result.ours.cpu_seconds, result.peer.cpu_seconds) > 0 for result in quiet] == [True, True]
    rows = report.table(quiet).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert all(row.count("µs/token") == 4 for row in rows[2:])


def test_a_busy_machine_has_expectations_of_its_own():
    case = replace(cases.CASES[0], speed=1.0, busy_speed=3.0)
    assert case.when(busy=False) == case
    busy = case.when(busy=True)
    assert (busy.speed, busy.name) == (3.0, f"{case.name}, busy")


def test_a_process_spins_until_the_context_ends():
    with busy_core() as spinner:
        assert psutil.Process(spinner).is_running()
    assert not psutil.pid_exists(spinner)
    with pytest.raises(ZeroDivisionError), busy_core() as spinner:
        1 / 0  # noqa: B018
    assert not psutil.pid_exists(spinner)


def test_it_does_not_outlive_a_benchmark_that_is_killed():
    # The output ends when both processes have ended, as the second inherits it.
    result = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == -signal.SIGKILL


def test_the_clock_runs_from_one_step_to_another(monkeypatch):
    """Each step takes 10 seconds by the wall and 3 of CPU time."""
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
    assert clock.pace(tokens=6) == (5.0, 1.5)


def test_a_measurement_is_the_median_of_wall_and_cpu_time():
    times = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0)]
    assert Measurement.summarise(times, peak=4) == Measurement(2.0, 2.0, 1.0, 4)
    assert Measurement.summarise(times[:1]) == Measurement(3.0, 1.0, 0.0, 0)
