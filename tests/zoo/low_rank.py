"""An adapter as those of PEFT, for tests without it."""

import torch
from torch import Tensor


class LowRank(torch.nn.Module):
    """A linear map with a low-rank one beside it (Hu et al. 2021); as in PEFT, `weight` is that of the map alone."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.up(self.down(states))

    def merged(self) -> torch.nn.Linear:
        """The map itself, with what was beside it added to its weight."""
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base
