"""Runs of marked positions: what comes directly before and after each."""

import torch
from torch import Tensor


def span_boundaries(marked: Tensor) -> tuple[Tensor, Tensor]:
    """The unmarked neighbours of the run, a maximal sequence of marked positions in a row, that each position is in.

    Args:
        marked: (rows, length) bool.

    Returns:
        (rows, length) int64, the last unmarked position before, -1 for none, and the first one after, `length` for
        none. An unmarked position is its own neighbour.
    """
    length = marked.shape[1]
    positions = torch.arange(length, device=marked.device).expand_as(marked)
    before = positions.masked_fill(marked, -1).cummax(1).values
    after = positions.masked_fill(marked, length).flip(1).cummin(1).values.flip(1)
    return before, after
