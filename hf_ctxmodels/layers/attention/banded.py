"""Locally banded causal attention (Child et al. 2019, arXiv 1904.10509, section 4) that computes the band alone.

A mask over all pairs costs as much as dense attention. Here each block of queries attends to the blocks of keys that
its bands reach, all blocks in one call, so that time and memory grow with length times window.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.attention.rows import attend_rows

_SMALLEST_BLOCK = 64  # queries of a block


def attend_band(query: Tensor, key: Tensor, value: Tensor, window: int, *, scale: float, dropout: float) -> Tensor:
    """Each query sees its own position and the `window - 1` before it.

    Args:
        query, key, value: (batch, length, heads, head_dim); padding follows all tokens of a row.
        window: Width of the band.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.

    Returns:
        (batch, length, heads, head_dim).
    """
    batch, length = query.shape[:2]
    size = max(_SMALLEST_BLOCK, window // 2)
    blocks = -(-length // size)
    reach = -(-(window - 1) // size)  # blocks before its own that a query's band may touch
    queries = _blocks(query, 0, blocks * size - length, size).flatten(0, 1)
    keys, values = (_reached(_blocks(each, reach * size, blocks * size - length, size), reach) for each in (key, value))
    mask = _band_mask(blocks, size, reach, window, query).repeat(batch, 1, 1, 1)
    context = attend_rows(queries, keys, values, mask, is_causal=False, scale=scale, dropout=dropout)
    return context.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def _blocks(rows: Tensor, before: int, after: int, size: int) -> Tensor:
    """(batch, length, heads, head_dim), with zeros added -> (batch, blocks, size, heads, head_dim)."""
    padded = F.pad(rows, (0, 0, 0, 0, before, after)) if before or after else rows
    return padded.unflatten(1, (-1, size))


def _reached(blocks: Tensor, reach: int) -> Tensor:
    """(batch, reach + blocks, size, ...) -> (batch * blocks, (reach + 1) * size, ...): each with those before it."""
    count = blocks.shape[1] - reach
    return torch.cat([blocks[:, start : start + count] for start in range(reach + 1)], 2).flatten(0, 1)


def _band_mask(blocks: int, size: int, reach: int, window: int, like: Tensor) -> Tensor:
    """(blocks, 1, size, (reach + 1) * size) additive; no query sees the zeros before the first key."""
    queries = torch.arange(size, device=like.device)[:, None] + reach * size
    keys = torch.arange((reach + 1) * size, device=like.device)[None]
    hidden = (keys > queries) | (queries - keys >= window)
    first = (reach - torch.arange(blocks, device=like.device)) * size
    hidden = hidden | (keys < first[:, None, None])
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))[:, None]
