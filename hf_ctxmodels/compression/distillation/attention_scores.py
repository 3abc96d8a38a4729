"""Attention scores before the softmax, which no attention function gives: computed again from a layer's input."""

from typing import Any

from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.transformer import TransformerBlock


def attention_scores(block: nn.Module, states: Tensor, tokens: Tensor) -> Tensor:
    """QK^T times the layer's scale (Vaswani et al. 2017, equation 1), without position bias.

    Queries and keys of real tokens are computed by the layer's own map, a second time: attention functions are used as
    they are, and only distillation pays for it.

    Args:
        block: A layer with `SelfAttention`.
        states: (batch, length, hidden), the layer's input as `output_hidden_states` records it.
        tokens: (batch, length) bool, False at padding.

    Returns:
        (batch, heads, length, length), 0 wherever query or key is padding.

    Raises:
        CtxError: The layer has no such attention.
    """
    attention = require_attention(block)
    rows = states[tokens]
    if block.norm == "pre":  # type: ignore[union-attr]
        rows = block.attention_norm(rows)  # type: ignore[operator, union-attr]
    projected = linear(attention.qkv_proj, rows, 0, 2 * attention.inner_size)
    padded = projected.new_zeros(*tokens.shape, projected.shape[-1]).index_put((tokens,), projected)
    query, key = padded.unflatten(-1, (2, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    return query @ key.transpose(-1, -2) * attention.scale


def require_attention(block: Any) -> SelfAttention:
    """The self-attention of a layer; raises CtxError for a layer without."""
    if not (isinstance(block, TransformerBlock) and isinstance(block.attention, SelfAttention)):
        raise CtxError(
            f"{type(block).__name__} has no attention scores that can be learned from.",
            hint="leave out the term `attention`, or use models of BERT's kind.",
        )
    return block.attention
