"""Seeding of all random numbers of examples by `(seed, epoch, example index)`.

There is no global state, so results do not depend on the number of workers and processes, the order of a batch, or
resuming.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The purpose of random numbers: each has a separate sequence for the same `(seed, epoch, index)`."""

    CORRUPTION = 0
    PAIRING = 1
    ORDER = 2
    HELD_OUT = 3
    SAMPLING = 4
    MIXTURE = 5
    PART_ORDER = 6
    PART = 7


def generator(seed: int, epoch: int, index: int, purpose: Purpose = Purpose.CORRUPTION) -> np.random.Generator:
    """A generator seeded by its arguments (all >= 0), created in about ten microseconds."""
    entropy = np.random.SeedSequence((seed, epoch, index), spawn_key=(int(purpose),))
    return np.random.Generator(np.random.Philox(entropy))


STEP, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 8192  # numbers that fit into the L1 cache


def row_hashes(
    seed: int, epochs: Sequence[int], indices: Sequence[int], purpose: Purpose = Purpose.CORRUPTION, use: int = 0
) -> np.ndarray:
    """(rows,) keys of `uniforms`: the counterpart of `generator` for all examples of a batch."""
    keys = np.zeros(len(indices), dtype=np.uint64)
    for value in (seed, epochs, indices, int(purpose), use):
        keys = _mix((keys + STEP) ^ np.asarray(value, dtype=np.uint64))
    return keys


def uniforms(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """(n,) numbers in [0, 1) for the (n,) keys of sequences (`row_hashes`) and indices in them, by SplitMix64 (Steele,
    Lea & Flood 2014), which has random access; a generator per example would cost more than a short example's numbers.
    """
    result = np.empty(len(numbers))
    for start in range(0, len(numbers), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        state = numbers[chunk].astype(np.uint64) + np.uint64(1)
        state *= STEP
        state += keys[chunk]
        np.multiply(_mix(state) >> np.uint64(11), 2.0**-53, out=result[chunk])
    return result


_ROUNDS = 8  # of the Feistel network


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """(n,) images of (n,) indices in [0, size) under a random permutation for `(seed, epoch)`, with random access.

    A Feistel network permutes the numbers of an even number of bits; a number outside the range is permuted again until
    it is inside (cycle walking: Black & Rogaway 2002, section 4). The expected number of passes is below 4.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = row_hashes(seed, [epoch] * _ROUNDS, range(_ROUNDS), Purpose.ORDER)
    images = indices.astype(np.uint64)
    outside = np.arange(len(images))
    while len(outside):
        left, right = images[outside] >> half, images[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix((right + STEP) ^ key) & mask)
        images[outside] = (left << half) | right
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Mix the bits of each number, in place."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits
