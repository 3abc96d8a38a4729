"""What the loss of an objective on held-out text is compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BaselinePolicy:
    """How to predict an objective's targets by their frequency in the training text, without reading the input.

    Attributes:
        num_tokens: tokens from which one is predicted.
        excluded_ids: tokens that are no target.
        column: the column of an example that holds the tokens to count.
        targets: the head's targets that are tokens of `column`, or classes of a row; None for all.
        scores: (num_tokens,) counts -> (num_tokens,) logits of this prediction, for losses that are not the
            cross-entropy of one token among all; the head takes them in `loss_by_scores`.
    """

    num_tokens: int
    excluded_ids: Sequence[int]
    column: str = "input_ids"
    targets: tuple[str, ...] | None = None
    scores: Callable[[np.ndarray], np.ndarray] | None = None
