"""Sampling with counter-based random numbers, independent of a generator's state."""

import torch
from torch import Tensor

_BLOCK = 256  # columns of a partial sum
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) as a function of (seed, index): outputs of SplitMix64 (Steele, Lea & Flood 2014).

    Args:
        seeds: (...) int64.
        indices: (...) int64, 0 or more: position in the seed's sequence.

    Returns:
        (...) float32, multiples of 2^-24.
    """
    state = _scramble(seeds) + (indices + 1) * _STEP  # scrambled first, since consecutive seeds are common
    return (_logical_shift(_scramble(state), 40)).float() * 2.0**-24


def _scramble(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _FIRST
    state = (state ^ _logical_shift(state, 27)) * _SECOND
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right with zeros (torch extends the sign)."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def sample_categorical(probabilities: Tensor, uniform_numbers: Tensor) -> Tensor:
    """One sample per row by inversion: the first column at which the cumulative sum exceeds the row's uniform number.

    It needs one number per row, while the Gumbel trick needs one per column. The sum is over blocks of columns first,
    then over the columns of one block: one pass of sums with little rounding.

    Args:
        probabilities: (rows, columns) float32, non-negative with a positive sum, not necessarily 1.
        uniform_numbers: (rows,) in [0, 1).

    Returns:
        (rows,) int64 columns, none of probability 0.
    """
    columns = probabilities.shape[1]
    full = columns - columns % _BLOCK
    block_sums = probabilities[:, :full].unflatten(1, (-1, _BLOCK)).sum(-1)
    if full < columns:
        block_sums = torch.cat([block_sums, probabilities[:, full:].sum(1, keepdim=True)], 1)
    cumulative = block_sums.cumsum(1)
    level = uniform_numbers[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, level)
    level = (level - (cumulative - block_sums).gather(1, block)).clamp(min=0)
    candidates = block * _BLOCK + torch.arange(min(_BLOCK, columns), device=probabilities.device)
    candidate_probabilities = probabilities.gather(1, candidates.clamp(max=columns - 1))
    candidate_probabilities = candidate_probabilities.masked_fill(candidates >= columns, 0)
    return candidates.gather(1, _first_above(candidate_probabilities.cumsum(1), level)).squeeze(1)


def _first_above(cumulative: Tensor, level: Tensor) -> Tensor:
    """(rows, 1): the first column at which the cumulative sums exceed the level, despite rounding never past the
    last."""
    maximum = cumulative[:, -1:] * (1 - 2 * torch.finfo(cumulative.dtype).eps)
    return (cumulative <= torch.minimum(level, maximum)).sum(1, keepdim=True)
