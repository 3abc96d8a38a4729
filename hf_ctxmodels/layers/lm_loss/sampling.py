"""Drawing from distributions with numbers that belong to an example, not to a generator's state."""

import torch
from torch import Tensor

_BLOCK = 256  # words that are added up before one of them is looked for
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def uniforms(seeds: Tensor, places: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) that depend on (seed, place) only: the SplitMix64 generator (Steele, Lea & Flood 2014),
    jumped to its n-th output.

    Args:
        seeds: (...) int64.
        places: (...) int64 from 0 on: which number of the seed's sequence.

    Returns:
        (...) float32, multiples of 2^-24.
    """
    state = _scramble(seeds) + (places + 1) * _STEP  # scrambled first: seeds that follow each other are common
    return (_logical_shift(_scramble(state), 40)).float() * 2.0**-24


def _scramble(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _FIRST
    state = (state ^ _logical_shift(state, 27)) * _SECOND
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, zeros coming in (torch repeats the sign)."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def sample_rows(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """One draw per row by inversion: the first column at which the cumulative sum exceeds the row's number.

    The same distribution as the Gumbel trick (argmax of logits plus noise), for one number a row instead of one per
    column. The sum is taken over blocks of columns first, and over the columns of one block then: a pass over the
    probabilities that only adds up, and hardly any rounding.

    Args:
        probabilities: (rows, columns) float32, not negative, at least one positive in a row; they need not add up to 1.
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
    """(rows, 1): the first place at which the ascending `ends` exceed the level; rounding never leads past the last."""
    below_all = ends[:, -1:] * (1 - 2 * torch.finfo(ends.dtype).eps)
    return (ends <= torch.minimum(level, below_all)).sum(1, keepdim=True)
