"""What makes one vector of a sequence's states, where the model itself has it."""

from torch import Tensor, nn


class FirstTokenPooler(nn.Module):
    """Dense and tanh on the first token's state: what the pair and sequence heads read.

    Args:
        hidden_size: Width of the input and output.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return self.dense(first_states).tanh()
