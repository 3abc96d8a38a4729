"""Attention with dropout on its probabilities, on the CPU, where no kernel of torch has it."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.dropout import DROPOUT_LEVELS, byte_mask


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, rate: float
) -> Tensor:
    """Scaled dot-product attention with dropout.

    Equal to writing the formula out, but the probabilities are kept once for the backward pass, not also after dropout,
    and queries, keys and values not also in copies: half the memory of an attention layer at short lengths.

    Args:
        query, key, value: (batch, heads, length, head_dim), of any strides.
        mask: bool, broadcastable to (batch, heads, queries, keys), True where a query sees a key; or None.
        scaling: Factor on the scores.
        rate: Share of the probabilities dropped, above 0 and below 1; rounded as in `dropout`.
    """
    return _DroppedAttention.apply(query, key, value, mask, scaling, round(rate * DROPOUT_LEVELS))


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, levels: int
    ) -> Tensor:
        scores = ((query * scaling) @ key.transpose(2, 3)).float()
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        probabilities = torch.softmax(scores, -1, out=scores)
        kept = byte_mask(scores.shape, levels)
        ctx.scaling, ctx.scale = scaling, DROPOUT_LEVELS / (DROPOUT_LEVELS - levels)
        context = (probabilities * kept).mul_(ctx.scale).to(value.dtype) @ value
        # Laid out as the rows that leave the layer: what the next product keeps is this very memory.
        context = context.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, probabilities, kept, context)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probabilities, kept, context = ctx.saved_tensors
        grad = grad.to(value.dtype)
        dropped = (probabilities * kept).mul_(ctx.scale).to(value.dtype)
        grad_value = dropped.transpose(2, 3) @ grad
        # The gradient of a softmax subtracts each row's mean, which is grad . context whatever the dropout.
        mean = (grad * context).sum(-1, keepdim=True, dtype=torch.float32)
        grad_scores = (grad @ value.transpose(2, 3)).float().mul_(kept).mul_(ctx.scale).sub_(mean).mul_(probabilities)
        grad_scores = grad_scores.to(query.dtype)
        grad_query = (grad_scores @ key).mul_(ctx.scaling)
        grad_key = (grad_scores.transpose(2, 3) @ query).mul_(ctx.scaling)
        return grad_query, grad_key, grad_value, None, None, None
