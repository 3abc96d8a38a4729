"""The memory allocator during training on a CPU."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_NEVER_TRIM, _NEVER_MMAP = -1, 1 << 30
_ADJUSTED_MMAP = 32 << 20  # the maximum of glibc's dynamic threshold; it trims from twice that


@contextmanager
def retain_freed_memory() -> Iterator[None]:
    """Keep freed memory for the next step instead of returning it to the operating system.

    Every step allocates the same activations and gradients. glibc unmaps large freed blocks, so their pages are mapped
    and zeroed again in the next step. At the end free memory is returned, and glibc's dynamic thresholds are restored.
    No effect with other allocators.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    # blocks below the threshold come from the heap; older versions of glibc have a maximum
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
