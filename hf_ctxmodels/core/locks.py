"""Locks of files between processes, which the operating system releases when a process ends.

On a file system without locks a file counts as locked by this process: work may be done twice, but is not lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.output_files import wrap_write_errors


@contextmanager
def try_lock(file: Path) -> Iterator[bool]:
    """Lock a file for this process unless another one, on this or another machine, has locked it; yields whether it is
    locked. Raises CtxError if the file cannot be created."""
    lock = _new_lock(file)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError:  # no locks
        pass
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def wait_for_lock(file: Path, message: str = "", hint: str | None = None) -> Iterator[None]:
    """Lock a file for this process, after others have released it, with a message if it has to wait. Raises CtxError
    with the hint if the file cannot be created."""
    lock = _new_lock(file, hint)
    with suppress(OSError):  # no locks
        try:
            lock.acquire()
        except Timeout:
            print_status(message, bool(message))
            lock.acquire(blocking=True)
    try:
        yield
    finally:
        lock.release()


def _new_lock(file: Path, hint: str | None = None) -> FileLock:
    with wrap_write_errors(file, hint):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return FileLock(file, blocking=False, fallback_to_soft=False)
