"""Sampling with counter-based random numbers, independent of a generator's state."""

import torch
from torch import Tensor

_BLOCK = 256  # columns of a partial sum
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def uniforms(seeds: Tensor, places: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) as a function of (seed, place): outputs of SplitMix64 (Steele, Lea & Flood 2014).

    Args:
        seeds: (...) int64.
        places: (...) int64, 0 or more: position in the seed's sequence.

    Returns:
        (...) float32, multiples of 2^-24.
    """
    state = _scramble(seeds) + (places + 1) * _STEP  # scrambled first, since consecutive seeds are common
    return (_logical_shift(_scramble(state), 40)).float() * 2.0**-24


def _scramble(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _FIRST
    state = (state ^ _logical_shift(state, 27)) * _SECOND
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right with zeros (torch extends the sign)."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def sample_batches(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """One sample per row by inversion: the first column at which the cumulative sum exceeds the row's number.

    It needs one number per row, where the Gumbel trick needs one per column. The sum is over blocks of columns first,
    then over the columns of one block: one pass of sums with little rounding.

    Args:
        probabilities: (rows, columns) float32, non-negative with a positive sum, not necessarily 1.
        numbers: (rows,) in [0, 1).

    Returns:
        (rows,) int64 columns, none of probability 0.
    """
    columns = probabilities.shape[1]
    whole = columns - columns % _BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < columns:
        sums = torch.cat([sums, probabilities[:, whole:].sum(1, keepdim=True)], 1)
    ends = sums.cumsum(1)
    level = numbers[:, None] * ends[:, -1:]
    block = _first_above(ends, level)
    level = (level - (ends - sums).gather(1, block)).clamp(min=0)
    members = block * _BLOCK + torch.arange(min(_BLOCK, columns), device=probabilities.device)
    inside = probabilities.gather(1, members.clamp(max=columns - 1)).masked_fill(members >= columns, 0)
    return members.gather(1, _first_above(inside.cumsum(1), level)).squeeze(1)


def _first_above(ends: Tensor, level: Tensor) -> Tensor:
    """(rows, 1): the first column at which the ascending `ends` exceed the level, never past the last by rounding."""
    below_all = ends[:, -1:] * (1 - 2 * torch.finfo(ends.dtype).eps)
    return (ends <= torch.minimum(level, below_all)).sum(1, keepdim=True)
