"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3), plain and gated (Shazeer 2020)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_ctxmodels.layers.cpu.onednn import can_use_onednn
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import apply_linear, is_rowwise

_CHUNK = 1024  # rows for which a CPU holds the wide states at once, where no gradient needs them


def get_activation(name: str) -> nn.Module:
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
        bias: Whether the maps have a bias.
        clamp: Whether values that fp16 cannot hold become the largest that it can, before and after the second map.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        clamp: bool = False,
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = get_activation(activation)
        self.dropout = Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.clamp = clamp

    def activate(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., intermediate), before dropout."""
        return self.activation(apply_linear(self.up_proj, hidden_states))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        if not self._may_chunk(hidden_states):
            return self._compute(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = torch.empty_like(rows)
        for start in range(0, len(rows), _CHUNK):
            output[start : start + _CHUNK] = self._compute(rows[start : start + _CHUNK])
        return output.view(hidden_states.shape)

    def _compute(self, hidden_states: Tensor) -> Tensor:
        between = self.dropout(self._finite(self.activate(hidden_states)))
        return self._finite(apply_linear(self.down_proj, between))

    def _may_chunk(self, hidden_states: Tensor) -> bool:
        """Whether there are many rows, nobody needs the wide states or the order of dropout, and a CPU computes now."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if hidden_states.numel() <= _CHUNK * hidden_states.shape[-1] or self.activation._forward_hooks:
            return False
        return can_use_onednn(hidden_states) and all(map(is_rowwise, self._maps()))

    def _maps(self) -> list[nn.Module]:
        return [self.up_proj, self.down_proj]

    def _finite(self, tensor: Tensor) -> Tensor:
        return clamp_to_float16(tensor) if self.clamp else tensor


class GatedFeedForward(FeedForward):
    """A feed-forward network whose activation gates a second map of its input (Shazeer 2020, arXiv 2002.05202,
    equation 5): with "gelu_new" it is that of T5 v1.1.

    Args: those of `FeedForward`.

    Attributes:
        gate_proj: The map under the activation; `up_proj` is the linear one.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation, bias=bias, **kwargs)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def _maps(self) -> list[nn.Module]:
        return [*super()._maps(), self.gate_proj]

    def activate(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., intermediate), before dropout."""
        gate = self._finite(self.activation(apply_linear(self.gate_proj, hidden_states)))
        return gate * self._finite(apply_linear(self.up_proj, hidden_states))  # infinite times zero would be no number


def clamp_to_float16(tensor: Tensor) -> Tensor:
    """The tensor, in fp16 with its infinite values replaced by the largest finite ones; other types are unchanged."""
    if tensor.dtype is not torch.float16:
        return tensor
    largest = torch.finfo(torch.float16).max
    return tensor.clamp(-largest, largest)
