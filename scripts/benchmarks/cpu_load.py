"""CPU load by a second process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The process ends when its parent is gone, even if the benchmark was killed.
_BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_core() -> Iterator[int]:
    """Occupy one core with a second process within the context; yields its process id."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
