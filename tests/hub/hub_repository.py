"""Repositories of the local Hub, and the validation of model cards."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPO = "zoo/tiny-model"
PICKLES = (".bin", ".pt", ".pth", ".pkl")


def push_command(model: Path, repo_id: str, *flags: str) -> list[str]:
    """Arguments of `python` in a new process that pushes a model."""
    return ["-m", "hf_ctxmodels", "push", "--model", str(model), "--repo_id", repo_id, *flags]


class HubError(Exception):
    """An error response; the client chooses its exception by `code`, the header `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Blob:
    """A file of a commit. `oid` is git's blob id, or the sha256 of a large file."""

    content: bytes
    oid: str
    lfs: bool


@dataclass
class Repository:
    """`branches` maps names to commit ids, and `commits` maps these to the path and blob of each file."""

    name: str
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        """Add a commit with these files, and no others, to a branch; returns its id."""
        listing = [(path, blob.oid) for path, blob in sorted(files.items())]
        oid = hashlib.sha1(json.dumps([self.branches.get(branch), message, listing]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str:
        """The commit id of a branch or a commit id."""
        commit = self.branches.get(revision, revision)
        if commit not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


def git_blob_id(content: bytes) -> str:
    """The blob id of git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def metadata_errors(content: str) -> list[str]:
    """Validate the metadata of a model card; returns error messages."""
    block = re.match(r"\A---\r?\n(.*?)\r?\n---(\r?\n|\Z)", content, re.DOTALL)
    if block is None:
        return ["The card has no metadata block between two lines of three dashes."]
    try:
        metadata = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"The metadata is not valid YAML: {error}"]
    if not isinstance(metadata, dict):
        return ["The metadata must be a mapping."]
    errors = []
    for key in ("tags", "datasets", "metrics"):
        values = metadata.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            errors.append(f'"{key}" must be an array of strings')
    for key in ("library_name", "pipeline_tag", "license"):
        if not isinstance(metadata.get(key, ""), str):
            errors.append(f'"{key}" must be a string')
    for number, model in enumerate(metadata.get("model-index", [])):
        if not isinstance(model.get("name"), str):
            errors.append(f'"model-index[{number}].name" is required')
        for result in model.get("results", []):
            errors += _result_errors(f"model-index[{number}].results", result)
    return errors


def _result_errors(location: str, result: dict[str, Any]) -> list[str]:
    errors = []
    if not isinstance(result.get("task", {}).get("type"), str):
        errors.append(f'"{location}.task.type" is required')
    if not {"type", "name"} <= set(result.get("dataset", {})):
        errors.append(f'"{location}.dataset" must have "type" and "name"')
    for metric in result.get("metrics", [{}]):
        if not isinstance(metric.get("type"), str) or metric.get("value") is None:
            errors.append(f'"{location}.metrics" must have "type" and "value"')
    return errors
