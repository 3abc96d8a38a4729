"""Self-attention with one fused query-key-value projection (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_ctxmodels.layers.linear import Linear, linear

if TYPE_CHECKING:
    from hf_ctxmodels.layers.attention.layouts import Layout


class SelfAttention(nn.Module):
    """Multi-head self-attention: one matrix product gives queries, keys and values.

    Args:
        hidden_size: Width of the input and output.
        num_heads: Number of heads; must divide `hidden_size`.
        dropout: Dropout on the attention probabilities.
        config: Only handed to the attention interface of transformers, which reads the implementation in use from it.
        bias: Whether the projections have a bias.
    """

    is_causal = False

    def __init__(
        self, hidden_size: int, num_heads: int, *, dropout: float, config: PreTrainedConfig, bias: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.scaling = (hidden_size // num_heads) ** -0.5
        self.attention_dropout = dropout
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden_states: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Attend within the sequences of `layout`.

        Args:
            hidden_states: (..., hidden) as packed by `layout`.
            layout: Says which rows attend to which, and which rows' outputs are wanted.

        Returns:
            (..., hidden) at the wanted rows, and the attention probabilities where the implementation gives them.
        """
        queries = layout.query_rows(hidden_states)
        if queries is hidden_states:
            query, key, value = self._split_heads(self.qkv_proj(hidden_states), 3)
        else:
            width = self.out_proj.in_features
            weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
            query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            (query,) = self._split_heads(linear(queries, weight[:width], query_bias), 1)
            key, value = self._split_heads(linear(hidden_states, weight[width:], key_value_bias), 2)
        context, probabilities = layout.attend(self, query, key, value)
        return self.out_proj(context.flatten(-2)), probabilities

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(..., parts * hidden) -> `parts` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (parts, self.num_heads, -1)).unbind(-3)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention as written in the paper (equation 1): the oracle of every fast path.

    Args:
        module: The attention module; its `training` flag switches dropout.
        query, key, value: (batch, heads, length, head_dim).
        attention_mask: Additive, broadcastable to (batch, heads, length, length), or None.
        scaling: Factor on the scores.
        dropout: Dropout on the probabilities.
        position_bias: Additive like the mask, or None.

    Returns:
        (batch, length, heads, head_dim) context and (batch, heads, length, length) probabilities.
    """
    scores = query @ key.transpose(2, 3) * scaling
    for bias in (position_bias, attention_mask):
        if bias is not None:
            scores = scores + bias
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities
