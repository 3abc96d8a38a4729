"""Batches for distillation: what the terms count, and the teacher's own inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_ctxmodels.compression.distillation.forward_pass import real_tokens
from hf_ctxmodels.compression.distillation.model import TEACHER
from hf_ctxmodels.compression.distillation.prediction_losses import ROWS, TOKENS
from hf_ctxmodels.core.constants import IGNORE_INDEX

Collate = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]


class DistillationCollator:
    """A collator that adds to batches what `CtxDistillationModel` reads beside the student's inputs.

    Returns: those of `collate`, and
        distilled_tokens: (batch, length) int64, 0 at real tokens and -100 at padding.
        distilled_examples: (batch,) int64, 0.
        teacher_...: what `collate_teacher` returns, with this prefix.

    The first two are what is counted in a step, so that its gradient is that of one batch.

    Args:
        collate: The student's collator.
        collate_teacher: The teacher's, of those columns of the features that begin with `teacher_`, without the prefix;
            None for a teacher that reads the student's inputs.

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
        own = [{name: each for name, each in row.items() if not name.startswith(TEACHER)} for row in features]
        batch = dict(self._collate(own))
        tokens = real_tokens(batch)
        batch[TOKENS] = torch.where(tokens, 0, IGNORE_INDEX)
        batch[ROWS] = torch.zeros(len(tokens), dtype=torch.int64)
        if self._collate_teacher is not None:
            rows = [
                {name.removeprefix(TEACHER): each for name, each in row.items() if name.startswith(TEACHER)}
                for row in features
            ]
            batch |= {f"{TEACHER}{name}": each for name, each in self._collate_teacher(rows).items()}
        return batch
