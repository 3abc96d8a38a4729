"""Naive attention: the reference for the optimized implementations, and the "eager" implementation."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), with the signature of transformers' functions.

    Args:
        module: Its `training` flag switches dropout.
        query, key, value: (batch, heads, length, head_dim).
        attention_mask: Broadcastable to (batch, heads, queries, keys): additive, or bool, False at masked keys; or
            None.
        scaling: Factor on the scores.
        dropout: Dropout on the probabilities.
        position_bias: Additive, in the shape of the mask, or None.

    Returns:
        (batch, queries, heads, head_dim) context and (batch, heads, queries, keys) probabilities.
    """
    scores = query @ key.transpose(2, 3) * scaling
    for bias in (position_bias, attention_mask):
        if bias is not None and bias.dtype == torch.bool:
            scores = scores.masked_fill(~bias, torch.finfo(scores.dtype).min)
        elif bias is not None:
            scores = scores + bias
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities
