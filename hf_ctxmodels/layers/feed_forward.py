"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3)."""

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import apply_linear


def make_activation(name: str) -> nn.Module:
    """An activation by transformers' name (`gelu`, `relu`, ...). For `gelu_new`, the tanh approximation of GELU, it is
    torch's single operation in place of the eight elementwise operations there."""
    return nn.GELU(approximate="tanh") if name == "gelu_new" else ACT2FN[name]


class FeedForward(nn.Module):
    """Two linear maps with an activation between them.

    Args:
        hidden_size: Width of the input and output.
        intermediate_size: Width between the two maps.
        activation: Name of an activation known to transformers (`gelu`, `relu`, ...).
        dropout: Dropout between the activation and the second map.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.activation = make_activation(activation)
        self.dropout = Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return apply_linear(self.down_proj, self.dropout(self.activation(apply_linear(self.up_proj, hidden_states))))
