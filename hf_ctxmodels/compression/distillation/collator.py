"""Batches for distillation: the losses' targets, and the teacher's own inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_ctxmodels.compression.distillation.forward_pass import real_token_mask
from hf_ctxmodels.compression.distillation.prediction_losses import EXAMPLES, TOKENS
from hf_ctxmodels.core.constants import IGNORE_INDEX

Collate = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]

TEACHER_PREFIX = "teacher_"
"""Prefix of the teacher's inputs in a batch, if it has its own tokenizer."""


class DistillationCollator:
    """A collator that adds to a batch the inputs of `CtxDistillationModel`.

    Returns: the batch of `collate`, and
        distilled_tokens: (batch, length) int64, 0 at real tokens and -100 at padding.
        distilled_examples: (batch,) int64, 0.
        teacher_...: The batch of `collate_teacher`, with this prefix.

    The first two are targets that are counted in a step, so that its gradient does not depend on micro-batches.

    Args:
        collate: The student's collator.
        collate_teacher: The teacher's collator, for the columns of the features with the prefix `teacher_`, which is
            removed; None for a teacher that reads the student's inputs.

    Example:
        >>> import torch
        >>> collate = DistillationCollator(lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])})
        >>> sorted(collate([{"input_ids": [1, 2]}]))
        ['distilled_examples', 'distilled_tokens', 'input_ids']
    """

    def __init__(self, collate: Collate, collate_teacher: Collate | None = None) -> None:
        self._collate, self._collate_teacher = collate, collate_teacher

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of `features`."""
        student_features = [
            {name: value for name, value in feature.items() if not name.startswith(TEACHER_PREFIX)}
            for feature in features
        ]
        batch = dict(self._collate(student_features))
        token_mask = real_token_mask(batch)
        batch[TOKENS] = torch.where(token_mask, 0, IGNORE_INDEX)
        batch[EXAMPLES] = torch.zeros(len(token_mask), dtype=torch.int64)
        if self._collate_teacher is not None:
            teacher_features = [
                {
                    name.removeprefix(TEACHER_PREFIX): value
                    for name, value in feature.items()
                    if name.startswith(TEACHER_PREFIX)
                }
                for feature in features
            ]
            teacher_batch = self._collate_teacher(teacher_features)
            batch |= {f"{TEACHER_PREFIX}{name}": value for name, value in teacher_batch.items()}
        return batch
