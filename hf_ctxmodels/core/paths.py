"""Paths and URLs of files."""

import re
from pathlib import Path


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL; a `Path` of a URL has a single slash."""
    return "://" in str(path) or (isinstance(path, Path) and bool(re.match(r"[a-z][\w+.:-]+:/", str(path))))


def local_path(path: str | Path) -> str:
    """A path with `~` expanded, and the path of a `file://` URL; other URLs are unchanged."""
    text = str(path).removeprefix("file://")
    return text if is_url(text) else str(Path(text).expanduser())
