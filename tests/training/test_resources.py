"""What the loop takes of a machine: background workers, and the memory of a step."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_ctxmodels.training.batches import default_workers

STEPS = """
import resource
from contextlib import nullcontext
import torch
from hf_ctxmodels.training.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(4 << 20) for _ in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for context in (keep_freed_memory(), nullcontext()):
    with context:
        for _ in range(4):
            faults()
        print(faults())
"""


@pytest.mark.parametrize(
    ("cores", "processes", "device", "workers"),
    [(2, 1, "cpu", 0), (3, 1, "cpu", 0), (4, 1, "cpu", 1), (4, 2, "cpu", 0), (8, 2, "cpu", 1), (2, 1, "cuda", 1)],
)
def test_few_cores_that_train_make_the_batches_themselves(cores, processes, device, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    accelerator = SimpleNamespace(num_processes=processes, device=torch.device(device))
    assert default_workers(accelerator) == workers


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_step_reuses_the_memory_of_the_step_before():
    """Eight blocks of 16 MB have 32,768 pages, or 64 huge ones, which glibc by itself maps anew."""
    result = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    kept, returned = map(int, result.stdout.split())
    assert kept < 30 <= returned
