"""Removal of local absolute paths from published records: of each path only the last part stays."""

import dataclasses
import shlex
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from hf_ctxmodels.training.metrics.summary import TrainingSummary

_FILE_SCHEME = "file://"


def without_local_paths(value: Any) -> Any:
    """Replace every absolute path in a JSON value's strings by its last part: "/home/me/text.txt" -> "text.txt".

    A string may hold several paths, separated by ", " or "=".
    """
    if isinstance(value, dict):
        return {name: without_local_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_local_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    return ", ".join("=".join(map(_last_part, item.split("="))) for item in value.split(", "))


def published_summary(summary: TrainingSummary) -> TrainingSummary:
    """The summary of a training run without local paths."""
    try:
        words = shlex.split(summary.command)
    except ValueError:  # a quotation without an end, which somebody has written there
        words = summary.command.split()
    fields = without_local_paths({each.name: getattr(summary, each.name) for each in dataclasses.fields(summary)})
    return TrainingSummary(**{**fields, "command": shlex.join(map(without_local_paths, words))})


def _last_part(text: str) -> str:
    path = text.removeprefix(_FILE_SCHEME)
    if PureWindowsPath(path).drive:
        return PureWindowsPath(path).name or text
    is_local = path != text or path.startswith("~") or PurePosixPath(path).is_absolute()
    return (PurePosixPath(path).name if is_local else "") or text
