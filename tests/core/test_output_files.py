"""Tests for writing files safely, on systems with other rules."""

import errno
import fcntl
import os
import stat

import pytest

from hf_ctxmodels.core.output_files import flush_to_disk, write_text_file
from hf_ctxmodels.data.text_files import read_lines


@pytest.fixture
def windows_rules(monkeypatch):
    """Directories cannot be opened, and only files that are open for writing can be flushed; returns flushed files."""
    system_open, system_fsync, flushed = os.open, os.fsync, []

    def open_file(path, flags, *arguments, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return system_open(path, flags, *arguments, **options)

    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        system_fsync(descriptor)
        flushed.append(stat.S_ISREG(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", fsync)
    return flushed


def test_flushing_under_windows_rules(tmp_path, windows_rules):
    write_text_file(tmp_path / "text.txt", "text")
    windows_rules.clear()
    flush_to_disk(tmp_path / "text.txt")
    flush_to_disk(tmp_path)
    assert windows_rules == [True]
    assert (tmp_path / "text.txt").read_text() == "text"


def test_flushing_a_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        flush_to_disk(tmp_path / "missing")


def test_flushing_an_unwritable_file_raises(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        flush_to_disk(tmp_path / "file")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_text_files_are_compressed_by_their_suffix(tmp_path, name):
    """As of `predict --output predictions.jsonl.gz`; equal texts give equal files."""
    text = "Käse\n" * 100
    write_text_file(tmp_path / name, text)
    content = (tmp_path / name).read_bytes()
    assert "".join(read_lines(tmp_path / name)) == text
    assert (len(content) < len(text.encode())) == (name != "a.jsonl")
    write_text_file(tmp_path / name, text)
    assert (tmp_path / name).read_bytes() == content
