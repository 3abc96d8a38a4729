"""Locally banded causal attention (Child et al. 2019, arXiv 1904.10509, section 4) that computes only the band.

A mask over all pairs costs as much as dense attention. Here each block of queries attends to the keys in the bands of
its queries, so that time and memory grow with length times window. On a CPU the blocks are computed one after the other
on slices of the keys, whose copies would take more memory than dense attention; elsewhere all blocks in one call.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.cpu.dropout import scaled_dot_product_attention

_MIN_BLOCK_SIZE = 64  # queries


def banded_attention(query: Tensor, key: Tensor, value: Tensor, window: int, *, scale: float, dropout: float) -> Tensor:
    """Causal attention of each query to the last `window` positions up to and including itself.

    Args:
        query, key, value: (batch, length, heads, head_dim); padding follows all tokens of a sequence.
        window: Width of the band.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.

    Returns:
        (batch, length, heads, head_dim).
    """
    size = max(_MIN_BLOCK_SIZE, window // 2)
    if query.device.type == "cpu" and not dropout and not is_traced(query):
        return _BlockwiseAttention.apply(query, key, value, window, size, scale)
    return _attend_all_blocks(query, key, value, window, size, scale=scale, dropout=dropout)


class _BlockwiseAttention(torch.autograd.Function):
    """The attention of each block of queries by torch's CPU kernel, forward and backward.

    Autograd through slices would allocate a gradient of all keys for each slice.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, size: int, scale: float) -> Tensor:
        """(batch, length, heads, head_dim)."""
        context, log_sums = torch.empty_like(query), []
        mask = _additive_mask(_outside_band(size, window - 1, window, query.device), query)
        for block, band_keys, columns in _block_slices(query.shape[1], size, window):
            block_mask = mask[: block.stop - block.start, columns]
            block_context, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, block].transpose(1, 2),
                key[:, band_keys].transpose(1, 2),
                value[:, band_keys].transpose(1, 2),
                attn_mask=block_mask,
                scale=scale,
            )
            context[:, block] = block_context.transpose(1, 2)
            log_sums.append(log_sum)
        ctx.save_for_backward(query, key, value, context, mask, *log_sums)
        ctx.window, ctx.size, ctx.scale = window, size, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, context, mask, *log_sums = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        slices = _block_slices(query.shape[1], ctx.size, ctx.window)
        for (block, band_keys, columns), log_sum in zip(slices, log_sums, strict=True):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, block].transpose(1, 2),
                query[:, block].transpose(1, 2),
                key[:, band_keys].transpose(1, 2),
                value[:, band_keys].transpose(1, 2),
                context[:, block].transpose(1, 2),
                log_sum,
                0.0,
                False,
                attn_mask=mask[: block.stop - block.start, columns],
                scale=ctx.scale,
            )
            grad_query[:, block] = gradients[0].transpose(1, 2)
            grad_key[:, band_keys] += gradients[1].transpose(1, 2)
            grad_value[:, band_keys] += gradients[2].transpose(1, 2)
        return grad_query, grad_key, grad_value, None, None, None


def _block_slices(length: int, size: int, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield for each block the slices of its queries, of the keys in their bands, and of the columns of these keys in
    the mask of a block."""
    for start in range(0, length, size):
        stop, first_key = min(start + size, length), max(0, start - window + 1)
        skipped = window - 1 - (start - first_key)  # columns before the first key of the sequence
        yield slice(start, stop), slice(first_key, stop), slice(skipped, window - 1 + stop - start)


def _attend_all_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int, size: int, *, scale: float, dropout: float
) -> Tensor:
    """Attend from all blocks in one call, to copies of the keys in the band of each block."""
    batch, length = query.shape[:2]
    num_blocks = -(-length // size)
    blocks_before = -(-(window - 1) // size)  # number of earlier blocks that a query's band may reach
    end_padding = num_blocks * size - length
    queries = _split_blocks(query, 0, end_padding, size).flatten(0, 1)
    keys = _with_blocks_before(_split_blocks(key, blocks_before * size, end_padding, size), blocks_before)
    values = _with_blocks_before(_split_blocks(value, blocks_before * size, end_padding, size), blocks_before)
    columns = torch.arange((blocks_before + 1) * size, device=query.device)
    block_numbers = torch.arange(num_blocks, device=query.device)[:, None, None]
    is_before_sequence = columns < (blocks_before - block_numbers) * size
    mask = _additive_mask(_outside_band(size, blocks_before * size, window, query.device) | is_before_sequence, query)
    mask = mask[:, None].repeat(batch, 1, 1, 1)
    context = scaled_dot_product_attention(queries, keys, values, mask, is_causal=False, scale=scale, dropout=dropout)
    return context.unflatten(0, (batch, num_blocks)).flatten(1, 2)[:, :length]


def _split_blocks(states: Tensor, zeros_before: int, zeros_after: int, size: int) -> Tensor:
    """(batch, length, heads, head_dim), with zeros added -> (batch, blocks, size, heads, head_dim)."""
    if zeros_before or zeros_after:
        states = F.pad(states, (0, 0, 0, 0, zeros_before, zeros_after))
    return states.unflatten(1, (-1, size))


def _with_blocks_before(blocks: Tensor, number: int) -> Tensor:
    """(batch, number + blocks, size, ...) -> (batch * blocks, (number + 1) * size, ...): each with the `number` blocks
    before it."""
    count = blocks.shape[1] - number
    return torch.cat([blocks[:, start : start + count] for start in range(number + 1)], 2).flatten(0, 1)


def _outside_band(size: int, num_before: int, window: int, device: torch.device) -> Tensor:
    """(size, num_before + size) bool: the keys, from `num_before` positions before a block to its end, outside the band
    of each query."""
    keys = torch.arange(num_before + size, device=device)
    distance = torch.arange(size, device=device)[:, None] + num_before - keys
    return (distance < 0) | (distance >= window)


def _additive_mask(masked: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(masked.shape, dtype=like.dtype, device=like.device).masked_fill_(masked, float("-inf"))
