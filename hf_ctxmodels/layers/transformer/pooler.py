"""Poolers of encoders."""

from torch import Tensor, nn


class FirstTokenPooler(nn.Module):
    """Dense and tanh on the first token's state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return self.dense(first_states).tanh()
