"""Paths and URLs of files."""

from pathlib import Path


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def local_path(path: str | Path) -> str:
    """A path with `~` expanded, and the path of a `file://` URL; other URLs are unchanged."""
    text = str(path).removeprefix("file://")
    return text if is_url(text) else str(Path(text).expanduser())
