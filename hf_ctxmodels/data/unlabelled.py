"""Unlabelled examples of a task, for semi-supervised heads (Clark et al. 2018, section 3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX

UNLABELLED = "unlabelled"


def mark_unlabelled(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mark features as unlabelled; their labels only indicate the positions of targets."""
    return [{**feature, UNLABELLED: True} for feature in features]


class UnlabelledCollator:
    """Collates labelled and unlabelled examples; unlabelled ones have `views` instead of labels, see CVT's heads.

    Args:
        collate: The task's collator.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]) -> None:
        self._collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch with `labels` and `views`, -100 for none."""
        task_features = [{name: value for name, value in feature.items() if name != UNLABELLED} for feature in features]
        batch = dict(self._collate(task_features))
        labels = batch["labels"]
        is_unlabelled = torch.tensor([UNLABELLED in feature for feature in features])
        is_unlabelled = is_unlabelled.view(-1, *[1] * (labels.dim() - 1)).expand_as(labels)
        batch["views"] = torch.where(is_unlabelled & (labels != IGNORE_INDEX), 1, IGNORE_INDEX)
        batch["labels"] = labels.masked_fill(is_unlabelled, IGNORE_INDEX)
        return batch
