"""Resources of the loop: data workers, and the memory of a step."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from hf_ctxmodels.training.loop import retain_freed_memory
from hf_ctxmodels.training.training_step import default_workers

LIBC = ctypes.CDLL(None)
BLOCK = 128 << 20

_COUNTERS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class MallInfo(ctypes.Structure):
    """Result of mallinfo2(3): `arena` is the size of the heap, `hblkhd` the size of separately mapped blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTERS]


@pytest.mark.parametrize(
    ("cores", "processes", "device", "workers"),
    [(2, 1, "cpu", 0), (3, 1, "cpu", 0), (4, 1, "cpu", 1), (4, 2, "cpu", 0), (8, 2, "cpu", 1), (2, 1, "cuda", 1)],
)
def test_default_workers(cores, processes, device, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    accelerator = SimpleNamespace(num_processes=processes, device=torch.device(device))
    assert default_workers(accelerator) == workers


def freed_block() -> tuple[bool, bool]:
    """Whether a large block is mapped by itself, and whether freeing it makes the heap smaller."""
    before = LIBC.mallinfo2()
    block = LIBC.malloc(BLOCK)
    within = LIBC.mallinfo2()
    LIBC.free(ctypes.c_void_p(block))
    return within.hblkhd - before.hblkhd >= BLOCK, LIBC.mallinfo2().arena < within.arena


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="an allocator other than that of glibc 2.33 or later")
def test_freed_memory_is_retained():
    LIBC.mallinfo2.restype, LIBC.malloc.restype = MallInfo, ctypes.c_void_p
    LIBC.malloc.argtypes = [ctypes.c_size_t]
    with retain_freed_memory():
        assert freed_block() == (False, False)
    assert freed_block() == (True, False)
    with pytest.raises(ZeroDivisionError), retain_freed_memory():
        1 / 0  # noqa: B018
    assert freed_block() == (True, False)
