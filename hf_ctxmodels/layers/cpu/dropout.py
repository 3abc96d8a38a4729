"""Dropout (Srivastava et al. 2014) of activations and of attention probabilities, with fast kernels on a CPU.

On a CPU torch samples the random numbers one by one on one thread, and stores a floating-point mask: about a tenth of a
training step's time and memory. Here one random 64-bit number decides four elements, and the mask is in bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.compiled_ops import define_operator, is_compiled

DROPOUT_LEVELS = 1 << 16  # an element is dropped by 16 random bits


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, computed by `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...), unchanged in evaluation mode."""
        return dropout(input, self.p, self.training)


def dropout(tensor: Tensor, p: float, training: bool) -> Tensor:
    """Zero elements with probability `p` and scale the others to keep the expectation.

    On a CPU `p` is rounded to a multiple of 1/65536, with the scale of the rounded rate, so the result is unbiased.
    Random numbers come from torch's default generator. On other devices, and in an exported graph, this is torch's
    dropout.
    """
    if not training or p == 0:
        return tensor
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_exporting() or levels in (0, DROPOUT_LEVELS):
        return F.dropout(tensor, p, training)
    if is_compiled():
        return tensor * _mask_operator(tensor, levels) * inverted_dropout_scale(levels)
    return _ByteMaskDropout.apply(tensor, dropout_mask(tensor.shape, levels), inverted_dropout_scale(levels))


def shared_dropout(
    tensor: Tensor, groups: Tensor, num_groups: int, p: float, training: bool, *, drop_rows: bool
) -> Tensor:
    """Dropout with one mask for all rows of a group.

    With sequences as groups it is variational dropout (Gal & Ghahramani 2016): the same features of a sequence are
    dropped at every step. With word ids as groups and `drop_rows`, which drops whole rows instead of single features,
    it is embedding dropout (Merity et al. 2017, section 4.3): all occurrences of a word are dropped.

    Args:
        tensor: (..., rows, width).
        groups: (..., rows) group of each row, below `num_groups`; missing leading dimensions are broadcast.
    """
    if not training or p == 0:
        return tensor
    shape = torch.Size((num_groups, 1 if drop_rows else tensor.shape[-1]))
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return tensor * F.dropout(tensor.new_ones(shape), p, training)[groups]
    return _ByteMaskDropout.apply(tensor, dropout_mask(shape, levels)[groups], inverted_dropout_scale(levels))


def variational_dropout(states: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of (batch, length, width) states with one mask for all positions of a row (Gal & Ghahramani 2016)."""
    rows = torch.arange(states.shape[0], device=states.device)[:, None].expand(states.shape[:2])
    return shared_dropout(states, rows, states.shape[0], p, training, drop_rows=False)


class VariationalDropout(nn.Dropout):
    """`variational_dropout` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width), unchanged in evaluation mode."""
        return variational_dropout(input, self.p, self.training)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, dropout: float
) -> Tensor:
    """Scaled dot-product attention by torch's kernels, and on a CPU with dropout by `attention_with_dropout`.

    Queries, keys, values and the result are (batch, length, heads, head_dim), an additive mask is broadcastable to
    (batch, heads, queries, keys); `is_causal` requires equal numbers of queries and keys.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if mask is not None:
        mask = mask.to(query.dtype)
    if 0 < dropout < 1 and query.device.type == "cpu":  # no CPU kernel of torch supports dropout
        if is_causal:
            mask = query.new_full((query.shape[2], key.shape[2]), float("-inf")).triu(1)
        context = attention_with_dropout(query, key, value, mask, scale=scale, dropout=dropout)
    else:
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    return context.transpose(1, 2)


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, dropout: float
) -> Tensor:
    """Scaled dot-product attention with dropout, above 0 and below 1, rounded as in the function `dropout`.

    It saves one copy of the probabilities for the backward pass, no dropout mask, and no copies of queries, keys and
    values: less than half the memory at short lengths.

    Args:
        query, key, value: (batch, heads, length, head_dim), of any strides.
        mask: Added to the scores, broadcastable to (batch, heads, queries, keys), -inf at masked keys; or None. It gets
            a gradient if it requires one.
    """
    levels = min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)
    return _AttentionWithDropout.apply(query, key, value, mask, scale, levels)


def dropout_mask(shape: torch.Size, dropped_levels: int) -> Tensor:
    """0 with probability `dropped_levels` / 65536, for dropped elements, otherwise 1; int8, since torch multiplies by
    booleans far more slowly."""
    return (_random_int16(shape) >= dropped_levels - DROPOUT_LEVELS // 2).view(torch.int8)


def inverted_dropout_scale(dropped_levels: int) -> float:
    """The factor on the remaining elements that keeps the expectation."""
    return DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped_levels)


def _random_int16(shape: torch.Size) -> Tensor:
    elements = shape.numel()
    numbers = torch.empty((elements + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return numbers.view(torch.int16)[:elements].view(shape)


_mask_operator = define_operator(
    "dropout_mask(Tensor like, int dropped_levels) -> Tensor",
    lambda like, dropped_levels: dropout_mask(like.shape, dropped_levels),
    lambda like, dropped_levels: like.new_empty(like.shape, dtype=torch.int8),
    is_random=True,
)


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


class _AttentionWithDropout(torch.autograd.Function):
    """Saves the probabilities with the sign of the dropout mask: negative where dropped."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, levels: int
    ) -> Tensor:
        ctx.scale, ctx.dropout_scale = scale, inverted_dropout_scale(levels)
        ctx.mask_shape_and_dtype = None if mask is None else (mask.shape, mask.dtype)
        scores = (_as_matrices(query, scale) @ _as_matrices(key).mT).float().unflatten(0, query.shape[:2])
        if mask is not None:
            scores.add_(mask)
        signs = _random_int16(scores.shape) + (DROPOUT_LEVELS // 2 - levels + 0.5)  # negative for dropped elements
        signed = torch.softmax(scores, -1, out=scores).copysign_(signs)
        context = signed.clamp_min(0).to(value.dtype).flatten(0, 1) @ _as_matrices(value)
        # In the memory layout of the output projection's input, which autograd saves: it is not copied again.
        output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        torch.mul(context.view_as(output), ctx.dropout_scale, out=output)
        ctx.save_for_backward(query, key, value, signed, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, signed, context = ctx.saved_tensors
        # The gradient of a softmax subtracts each row's mean, which is grad . context with or without dropout.
        mean = (grad * context).sum(-1, keepdim=True, dtype=torch.float32)
        grad = _as_matrices(grad.to(value.dtype), ctx.dropout_scale)
        masked_probabilities = signed.clamp_min(0)
        grad_value = masked_probabilities.to(value.dtype).flatten(0, 1).mT @ grad
        grad_scores = (grad @ _as_matrices(value).mT).float().view_as(signed).mul_(masked_probabilities)
        grad_scores = grad_scores.addcmul_(signed.abs(), mean, value=-1)
        grad_mask = None
        if ctx.needs_input_grad[3]:
            shape, dtype = ctx.mask_shape_and_dtype
            grad_mask = grad_scores.sum_to_size(shape).to(dtype)
        grad_scores = grad_scores.to(query.dtype).flatten(0, 1)
        grad_query = (grad_scores @ _as_matrices(key)).mul_(ctx.scale).view(query.shape)
        grad_key = (grad_scores.mT @ _as_matrices(query, ctx.scale)).view(key.shape)
        return grad_query, grad_key, grad_value.view(value.shape), grad_mask, None, None


def _as_matrices(tensor: Tensor, factor: float = 1.0) -> Tensor:
    """(batch, heads, length, head_dim), of any strides, times a factor -> (batch * heads, length, head_dim)."""
    return torch.mul(tensor, factor, out=tensor.new_empty(tensor.shape)).flatten(0, 1)
