"""Unlabelled examples of a task, for semi-supervised heads (Clark et al. 2018, section 3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX

UNLABELLED = "unlabelled"


def mark_unlabelled(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Features marked as unlabelled; their labels only mark the positions of targets."""
    return [{**feature, UNLABELLED: True} for feature in features]


class UnlabelledCollator:
    """A collator of labelled and unlabelled examples; the latter have `views` in place of labels, see CVT's heads.

    Args:
        collate: The task's collator.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]) -> None:
        self._collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch with `labels` and `views`, -100 for none."""
        bare = [{name: value for name, value in feature.items() if name != UNLABELLED} for feature in features]
        batch = dict(self._collate(bare))
        labels = batch["labels"]
        unlabelled = torch.tensor([UNLABELLED in feature for feature in features])
        unlabelled = unlabelled.view(-1, *[1] * (labels.dim() - 1)).expand_as(labels)
        there = labels != IGNORE_INDEX
        batch["views"] = torch.where(unlabelled & there, 1, IGNORE_INDEX)
        batch["labels"] = labels.masked_fill(unlabelled, IGNORE_INDEX)
        return batch
