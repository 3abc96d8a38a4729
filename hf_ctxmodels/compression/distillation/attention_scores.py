"""Attention scores before the softmax, computed from a layer's input, since attention functions do not return them."""

from typing import Any

from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.transformer import TransformerBlock


def attention_scores(block: nn.Module, hidden_states: Tensor, token_mask: Tensor) -> Tensor:
    """QK^T times the layer's scale (Vaswani et al. 2017, equation 1), without position bias.

    Queries and keys of real tokens are projected a second time by the layer's own projection, so that only distillation
    pays for the scores.

    Args:
        block: A layer with `SelfAttention`.
        hidden_states: (batch, length, hidden), the layer's input as `output_hidden_states` records it.
        token_mask: (batch, length) bool, False at padding.

    Returns:
        (batch, heads, length, length), 0 if the query or the key is padding.

    Raises:
        CtxError: The layer has no such attention.
    """
    attention = require_attention(block)
    states = hidden_states[token_mask]
    if block.norm == "pre":  # type: ignore[union-attr]
        states = block.attention_norm(states)  # type: ignore[operator, union-attr]
    projected = linear(attention.qkv_proj, states, 0, 2 * attention.inner_size)
    padded = projected.new_zeros(*token_mask.shape, projected.shape[-1]).index_put((token_mask,), projected)
    query, key = padded.unflatten(-1, (2, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    return query @ key.transpose(-1, -2) * attention.scale


def require_attention(block: Any) -> SelfAttention:
    """The self-attention of a layer; raises CtxError for a layer without attention scores."""
    if not (isinstance(block, TransformerBlock) and isinstance(block.attention, SelfAttention)):
        raise CtxError(
            f"{type(block).__name__} has no attention scores to learn.",
            hint="remove the loss attention, or use models with BERT's layers.",
        )
    return block.attention
