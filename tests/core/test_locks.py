"""Locks of files: exclusive, and without effect on file systems that have none."""

import errno

from filelock import FileLock

from hf_ctxmodels.core.locks import try_lock, wait_for_lock


def test_lock_is_exclusive(tmp_path):
    with try_lock(tmp_path / "locks" / "a") as first_acquired:
        with try_lock(tmp_path / "locks" / "a") as second_acquired:
            assert (first_acquired, second_acquired) == (True, False)
        with try_lock(tmp_path / "locks" / "b") as other_acquired:
            assert other_acquired
    with wait_for_lock(tmp_path / "locks" / "a"), try_lock(tmp_path / "locks" / "a") as acquired:
        assert not acquired


def test_file_system_without_locks(tmp_path, monkeypatch):
    def acquire(*args, **kwargs):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with try_lock(tmp_path / "a") as is_locked, wait_for_lock(tmp_path / "b", "waiting"):
        assert is_locked
