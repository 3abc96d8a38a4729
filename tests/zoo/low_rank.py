"""A LoRA layer, for tests without PEFT."""

import torch
from torch import Tensor


class LowRank(torch.nn.Module):
    """A linear layer plus a low-rank update (Hu et al. 2021). As in PEFT, `weight` is the weight of the base layer."""

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
        """Add the update to the weight of the base layer, and return the layer."""
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base
