"""Combinations of attention implementation and layout, which must give the same outputs."""

from typing import Any

from transformers import PreTrainedModel

from zoo.cases import Case

# Name -> options of the model; the first is the reference: eager attention on padded batches.
PATHS = {
    "eager": {"attention": "eager", "unpad": False},
    "padded": {"attention": "sdpa", "unpad": False},
    "unpadded": {"attention": "sdpa", "unpad": True},
}
SIDES = ("right", "left")


def models_by_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """A model for each path; without attention, the padded path equals the eager path and is left out."""
    paths = {path: options for path, options in PATHS.items() if case.has_attention or path != "padded"}
    return {path: case.model(**options, **changes) for path, options in paths.items()}


def models_by_fast_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """The models of all paths except the eager path."""
    models = models_by_path(case, **changes)
    del models["eager"]
    return models
