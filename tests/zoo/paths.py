"""The ways in which a model can be told to compute."""

from typing import Any

from transformers import PreTrainedModel

from zoo.cases import Case

# How a model can be told to compute; the first is the plain formula on padded rows.
PATHS = {
    "eager": {"attention": "eager", "unpad": False},
    "padded": {"attention": "sdpa", "unpad": False},
    "unpadded": {"attention": "sdpa", "unpad": True},
}
SIDES = ("right", "left")


def by_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """A model for each path; without attention the padded path is the plain formula itself."""
    paths = {path: options for path, options in PATHS.items() if case.has_attention or path != "padded"}
    return {path: case.model(**options, **changes) for path, options in paths.items()}


def by_fast_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """Those that do not compute the plain formula."""
    models = by_path(case, **changes)
    del models["eager"]
    return models
