"""From the states of a row's tokens to one vector for the row."""

from typing import Literal

import torch
from torch import Tensor, nn

Pooling = Literal["mean", "mean+max", "last+max+mean"]


class RowPooler(nn.Module):
    """Mean over a row's tokens; or with it the largest value of every dimension; or before these the last token's.

    Args:
        kind: "mean"; "mean+max" (Shen et al. 2018, arXiv 1805.09843, call it SWEM-concat); or "last+max+mean" (Howard &
            Ruder 2018, section 3.3).
    """

    def __init__(self, kind: Pooling) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, length, hidden) states and (batch, length) bool -> (batch, hidden), 2 or 3 * hidden."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        last = (columns * tokens).argmax(1)
        tokens = tokens[..., None]
        mean = (states.float() * tokens).sum(1) / tokens.sum(1)
        if self.kind == "mean":
            return mean.to(states.dtype)
        largest = states.masked_fill(~tokens, torch.finfo(states.dtype).min).amax(1)
        mean = mean.to(states.dtype)
        if self.kind == "mean+max":
            return torch.cat([mean, largest], -1)
        return torch.cat([states[torch.arange(len(states), device=states.device), last], largest, mean], -1)
