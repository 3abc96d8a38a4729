"""Removal of local absolute paths from published records; only the file name remains."""

import dataclasses
import shlex
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from hf_ctxmodels.training.summary import TrainingSummary

_FILE_SCHEME = "file://"


def without_local_paths(value: Any) -> Any:
    """Replace absolute paths in the strings of a JSON value by their file names: "/home/me/text.txt" -> "text.txt".

    A string may contain several paths separated by ", " or "=".
    """
    if isinstance(value, dict):
        return {name: without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return ", ".join("=".join(map(_file_name, item.split("="))) for item in value.split(", "))


def published_summary(summary: TrainingSummary) -> TrainingSummary:
    """Summary of a training run without local paths."""
    try:
        words = shlex.split(summary.command)
    except ValueError:  # an unbalanced quotation mark
        words = summary.command.split()
    fields = without_local_paths({field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)})
    return TrainingSummary(**{**fields, "command": shlex.join(map(without_local_paths, words))})


def _file_name(text: str) -> str:
    path = text.removeprefix(_FILE_SCHEME)
    if PureWindowsPath(path).drive:
        return PureWindowsPath(path).name or text
    is_local = path != text or path.startswith("~") or PurePosixPath(path).is_absolute()
    return (PurePosixPath(path).name if is_local else "") or text
