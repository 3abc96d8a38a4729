"""Dropout (Srivastava et al. 2014) of activations and of attention probabilities, with fast kernels on a CPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

DROPOUT_LEVELS = 1 << 16  # an element is dropped by 16 random bits


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` by `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...), unchanged in evaluation mode."""
        return dropout(input, self.p, self.training)


def dropout(tensor: Tensor, p: float, training: bool) -> Tensor:
    """Zero elements with probability `p` and scale the others to keep the expectation.

    On a CPU `p` is rounded to a multiple of 1/65536, with the scale of the rounded rate, so the result is unbiased.
    Draws come from torch's default generator. On other devices, and in a compiled graph, this is torch's dropout.
    """
    if not training or p == 0:
        return tensor
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return F.dropout(tensor, p, training)
    return _ByteMaskDropout.apply(tensor, dropout_mask(tensor.shape, levels), inverted_dropout_scale(levels))


def shared_dropout(tensor: Tensor, numbers: Tensor, count: int, p: float, training: bool, *, drop_rows: bool) -> Tensor:
    """Dropout with one mask for all rows of a tensor that have the same number.

    With sequence numbers it is variational dropout (Gal & Ghahramani 2016): the same features of a sequence are dropped
    at every step. With word ids and `drop_rows` it is embedding dropout (Merity et al. 2017, section 4.3): all occurrences
    of a word are dropped.

    Args:
        tensor: (..., rows, width).
        numbers: (..., rows) integers below `count`; missing leading dimensions are broadcast.
        count: Number of masks.
        p, training: As in `dropout`.
        drop_rows: Drop rows, not single features.
    """
    if not training or p == 0:
        return tensor
    shape = torch.Size((count, 1 if drop_rows else tensor.shape[-1]))
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return tensor * F.dropout(tensor.new_ones(shape), p, training)[numbers]
    return _ByteMaskDropout.apply(tensor, dropout_mask(shape, levels)[numbers], inverted_dropout_scale(levels))


def dropout_signs(shape: torch.Size, dropped_levels: int) -> Tensor:
    """Positive for kept elements, negative for dropped ones, with probability `dropped_levels` / 65536."""
    return _draws(shape) + (DROPOUT_LEVELS // 2 - dropped_levels + 0.5)


def dropout_mask(shape: torch.Size, dropped_levels: int) -> Tensor:
    """1 for kept elements, 0 for dropped ones, with probability `dropped_levels` / 65536; bytes, since torch multiplies
    by booleans far more slowly."""
    return (_draws(shape) >= dropped_levels - DROPOUT_LEVELS // 2).view(torch.int8)


def inverted_dropout_scale(dropped_levels: int) -> float:
    """The factor of kept elements that keeps the expectation."""
    return DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped_levels)


def _draws(shape: torch.Size) -> Tensor:
    """Uniform int16 numbers."""
    elements = shape.numel()
    draws = torch.empty((elements + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return draws.view(torch.int16)[:elements].view(shape)


class _ByteMaskDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return (tensor * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None


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
        ctx.scaling, ctx.scale = scaling, inverted_dropout_scale(levels)
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


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, dropout: float
) -> Tensor:
    """One call on (batch, length, heads, head_dim) tensors.

    Args:
        query, key, value: The rows.
        mask: Additive, broadcastable to (batch, heads, queries, keys); None where all is seen.
        is_causal: Whether the mask is the plain causal one, for as many queries as keys.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.
    """
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    if mask is not None:
        mask = mask.to(query.dtype)
    if 0 < dropout < 1 and query.device.type == "cpu":  # no kernel drops out there: torch would write the formula out
        if is_causal:
            mask = query.new_full((query.shape[2], key.shape[2]), float("-inf")).triu(1)
        context = attention_with_dropout(query, key, value, mask, scaling=scale, rate=dropout)
    else:
        context = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    return context.transpose(1, 2)
