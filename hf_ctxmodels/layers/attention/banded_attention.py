"""Locally banded causal attention (Child et al. 2019, arXiv 1904.10509, section 4) that computes the band alone.

A mask over all pairs costs as much as dense attention. Here each block of queries attends to the keys that its bands
reach, so that time and memory grow with length times window. On a CPU the blocks are computed one after the other on
slices of the keys, whose copies would take more memory than dense attention; else all blocks in one call.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.cpu.dropout import padded_attention

_SMALLEST_BLOCK = 64  # queries of a block


def attend_to_band(query: Tensor, key: Tensor, value: Tensor, window: int, *, scale: float, dropout: float) -> Tensor:
    """Each query sees its own position and the `window - 1` before it.

    Args:
        query, key, value: (batch, length, heads, head_dim); padding follows all tokens of a row.
        window: Width of the band.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.

    Returns:
        (batch, length, heads, head_dim).
    """
    size = max(_SMALLEST_BLOCK, window // 2)
    if query.device.type == "cpu" and not dropout and not is_traced(query):
        return _BlockByBlock.apply(query, key, value, window, size, scale)
    return _all_blocks(query, key, value, window, size, scale=scale, dropout=dropout)


class _BlockByBlock(torch.autograd.Function):
    """The attention of each block of queries by torch's CPU kernel, forward and backward.

    Autograd through slices would fill a gradient of all keys for each of them.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, size: int, scale: float) -> Tensor:
        """(batch, length, heads, head_dim)."""
        context, sums = torch.empty_like(query), []
        mask = _additive(_hidden(size, window - 1, window, query.device), query)
        for here, reached, columns in _slices(query.shape[1], size, window):
            rows = (query[:, here], key[:, reached], value[:, reached])
            found, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(each.transpose(1, 2) for each in rows), attn_mask=mask[: rows[0].shape[1], columns], scale=scale
            )
            context[:, here] = found.transpose(1, 2)
            sums.append(log_sum)
        ctx.save_for_backward(query, key, value, context, mask, *sums)
        ctx.window, ctx.size, ctx.scale = window, size, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, context, mask, *sums = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for (here, reached, columns), log_sum in zip(_slices(query.shape[1], ctx.size, ctx.window), sums, strict=True):
            rows = (gradient[:, here], query[:, here], key[:, reached], value[:, reached], context[:, here])
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(each.transpose(1, 2) for each in rows),
                log_sum,
                0.0,
                False,
                attn_mask=mask[: rows[0].shape[1], columns],
                scale=ctx.scale,
            )
            of_query[:, here], *shared = (each.transpose(1, 2) for each in found)
            of_key[:, reached] += shared[0]
            of_value[:, reached] += shared[1]
        return of_query, of_key, of_value, None, None, None


def _slices(length: int, size: int, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Of each block its queries, the keys they reach, and the columns of these in the mask of a block."""
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        before = window - 1 - (start - first)  # columns of keys before the row's first
        yield slice(start, stop), slice(first, stop), slice(before, window - 1 + stop - start)


def _all_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int, size: int, *, scale: float, dropout: float
) -> Tensor:
    """All blocks in one call, on copies of the keys that each block reaches."""
    batch, length = query.shape[:2]
    blocks = -(-length // size)
    reach = -(-(window - 1) // size)  # blocks before its own that a query's band may touch
    queries = _blocks(query, 0, blocks * size - length, size).flatten(0, 1)
    keys, values = (_reached(_blocks(each, reach * size, blocks * size - length, size), reach) for each in (key, value))
    columns = torch.arange((reach + 1) * size, device=query.device)
    no_keys = columns < (reach - torch.arange(blocks, device=query.device)[:, None, None]) * size  # before the row
    mask = _additive(_hidden(size, reach * size, window, query.device) | no_keys, query)
    mask = mask[:, None].repeat(batch, 1, 1, 1)
    context = padded_attention(queries, keys, values, mask, is_causal=False, scale=scale, dropout=dropout)
    return context.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def _blocks(rows: Tensor, before: int, after: int, size: int) -> Tensor:
    """(batch, length, heads, head_dim), with zeros added -> (batch, blocks, size, heads, head_dim)."""
    padded = F.pad(rows, (0, 0, 0, 0, before, after)) if before or after else rows
    return padded.unflatten(1, (-1, size))


def _reached(blocks: Tensor, reach: int) -> Tensor:
    """(batch, reach + blocks, size, ...) -> (batch * blocks, (reach + 1) * size, ...): each with those before it."""
    count = blocks.shape[1] - reach
    return torch.cat([blocks[:, start : start + count] for start in range(reach + 1)], 2).flatten(0, 1)


def _hidden(size: int, before: int, window: int, device: torch.device) -> Tensor:
    """(size, before + size) bool: the keys, from `before` positions before a block to its end, that a query does not
    see."""
    distance = torch.arange(size, device=device)[:, None] + before - torch.arange(before + size, device=device)
    return (distance < 0) | (distance >= window)


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
