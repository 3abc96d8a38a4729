"""From the states of a row's tokens to one vector for the row."""

from typing import Literal

import torch
from torch import Tensor, nn

Pooling = Literal["mean", "mean+max"]


class RowPooler(nn.Module):
    """Mean over a row's tokens; or that, and behind it the largest value of every dimension.

    Args:
        kind: "mean" or "mean+max" (Shen et al. 2018, arXiv 1805.09843, call the latter SWEM-concat).
    """

    def __init__(self, kind: Pooling) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, length, hidden) states and (batch, length) bool -> (batch, hidden) or (batch, 2 * hidden)."""
        tokens = tokens[..., None]
        mean = (states.float() * tokens).sum(1) / tokens.sum(1)
        if self.kind == "mean":
            return mean.to(states.dtype)
        largest = states.masked_fill(~tokens, torch.finfo(states.dtype).min).amax(1)
        return torch.cat([mean.to(states.dtype), largest], -1)
