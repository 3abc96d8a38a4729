"""Attention with dropout on its probabilities, on the CPU, where no kernel of torch has it."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.dropout import DROPOUT_LEVELS, dropout_signs, kept_scale


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, rate: float
) -> Tensor:
    """Scaled dot-product attention with dropout.

    Equal to writing the formula out, but for the backward pass the probabilities are kept once, neither also after
    dropout nor beside a mask, and queries, keys and values not also in copies: less than half the memory at short
    lengths.

    Args:
        query, key, value: (batch, heads, length, head_dim), of any strides.
        mask: Added to the scores, broadcastable to (batch, heads, queries, keys), -inf where a query does not see a
            key; or None. It has a gradient if it needs one.
        scaling: Factor on the scores.
        rate: Share of the probabilities dropped, above 0 and below 1; rounded as in `dropout`.
    """
    return _DroppedAttention.apply(query, key, value, mask, scaling, round(rate * DROPOUT_LEVELS))


class _DroppedAttention(torch.autograd.Function):
    """The sign of a probability that is kept for the backward pass says whether it was dropped: there is no mask."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, levels: int
    ) -> Tensor:
        ctx.scaling, ctx.scale = scaling, kept_scale(levels)
        ctx.mask_like = None if mask is None else (mask.shape, mask.dtype)
        scores = (_matrices(query, scaling) @ _matrices(key).mT).float().unflatten(0, query.shape[:2])
        if mask is not None:
            scores.add_(mask)
        signed = torch.softmax(scores, -1, out=scores).copysign_(dropout_signs(scores.shape, levels))
        context = signed.clamp_min(0).to(value.dtype).flatten(0, 1) @ _matrices(value)
        # Laid out as the rows that leave the layer: what the next product keeps is this very memory.
        rows = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        torch.mul(context.view_as(rows), ctx.scale, out=rows)
        ctx.save_for_backward(query, key, value, signed, rows)
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, signed, context = ctx.saved_tensors
        # The gradient of a softmax subtracts each row's mean, which is grad . context whatever the dropout.
        mean = (grad * context).sum(-1, keepdim=True, dtype=torch.float32)
        grad = _matrices(grad.to(value.dtype), ctx.scale)
        kept = signed.clamp_min(0)
        grad_value = kept.to(value.dtype).flatten(0, 1).mT @ grad
        grad_scores = (grad @ _matrices(value).mT).float().view_as(signed).mul_(kept)
        grad_scores = grad_scores.addcmul_(signed.abs(), mean, value=-1)
        grad_mask = None
        if ctx.needs_input_grad[3]:
            shape, dtype = ctx.mask_like
            grad_mask = grad_scores.sum_to_size(shape).to(dtype)
        grad_scores = grad_scores.to(query.dtype).flatten(0, 1)
        grad_query = (grad_scores @ _matrices(key)).mul_(ctx.scaling)
        grad_key = grad_scores.mT @ _matrices(query, ctx.scaling)
        gradients = ((grad_query, query), (grad_key, key), (grad_value, value))
        return (*(each.view(like.shape) for each, like in gradients), grad_mask, None, None)


def _matrices(tensor: Tensor, factor: float = 1.0) -> Tensor:
    """(batch, heads, length, head_dim), of any strides, times a factor -> (batch * heads, length, head_dim)."""
    return torch.mul(tensor, factor, out=tensor.new_empty(tensor.shape)).flatten(0, 1)
