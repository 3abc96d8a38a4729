"""A machine that is not quiet: another process that computes all the time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It looks for its parent as well, so that it ends with a benchmark that is killed.
_SPIN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_core() -> Iterator[int]:
    """A second process spins on one core for as long as the context lasts; gives its process id."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
