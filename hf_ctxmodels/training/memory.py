"""The CPU allocator while a model trains."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_NEVER_TRIM, _NEVER_MMAP = -1, 1 << 30
_ADJUSTED_MMAP = 32 << 20  # the most that glibc raises its threshold to by itself; it trims from twice that


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep the memory that a training step frees for the next step, instead of returning it to the operating system.

    Every step allocates the same activations and gradients. glibc unmaps large blocks when they are freed, so that each
    of their pages is mapped and zeroed again in the next step. At the end free memory is returned, and the thresholds
    become those that glibc reaches by itself where large blocks are freed. Other allocators are left alone.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    # Blocks below the threshold come from the heap; older versions of glibc refuse more than their own maximum.
    if (
        libc is None
        or not hasattr(libc, "mallopt")
        or not any(libc.mallopt(_MMAP_THRESHOLD, size) for size in (_NEVER_MMAP, _ADJUSTED_MMAP))
    ):
        yield
        return
    libc.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _ADJUSTED_MMAP)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _ADJUSTED_MMAP)
        libc.malloc_trim(0)
