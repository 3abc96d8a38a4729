"""The frequency baseline of an objective's held-out loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BaselinePolicy:
    """How to predict an objective's targets from their frequency in the training text alone.

    Attributes:
        num_tokens: Size of the vocabulary of targets.
        excluded_ids: Tokens that are never targets.
        column: The column of an example whose tokens are counted.
        targets: The head's targets that are tokens of `column` or classes of a row; None for all.
        scores: (num_tokens,) counts -> (num_tokens,) logits of this prediction, for losses that are not the
            cross-entropy of one token among all; passed to the head's `loss_by_scores`.
        token_classes: The head's targets that are classes of tokens, counted in collated batches as those of rows are.
    """

    num_tokens: int
    excluded_ids: Sequence[int]
    column: str = "input_ids"
    targets: tuple[str, ...] | None = None
    scores: Callable[[np.ndarray], np.ndarray] | None = None
    token_classes: tuple[str, ...] = ()
