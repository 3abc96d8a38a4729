"""Seeding of all random draws for examples by `(seed, epoch, example index)`.

There is no global state, so results do not depend on the number of workers and processes, the order of a batch, or a
resume.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The use of random numbers: each has its own sequence for the same `(seed, epoch, index)`."""

    CORRUPTION = 0
    PAIRING = 1
    ORDER = 2
    HELD_OUT = 3
    SAMPLING = 4
    MIXTURE = 5


def generator(seed: int, epoch: int, index: int, stream: Stream = Stream.CORRUPTION) -> np.random.Generator:
    """A generator seeded by its arguments (all >= 0), created in about ten microseconds."""
    entropy = np.random.SeedSequence((seed, epoch, index), spawn_key=(int(stream),))
    return np.random.Generator(np.random.Philox(entropy))


STEP, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_AT_ONCE = 8192  # numbers that fit into the L1 cache


def row_hashes(
    seed: int, epochs: Sequence[int], indices: Sequence[int], stream: Stream = Stream.CORRUPTION, use: int = 0
) -> np.ndarray:
    """(rows,) keys of `uniforms`: the counterpart of `generator` for all examples of a batch.

    Args:
        seed, epochs, indices: As in `generator`, for each example.
        stream, use: The use of the numbers.
    """
    keys = np.zeros(len(indices), dtype=np.uint64)
    for part in (seed, epochs, indices, int(stream), use):
        keys = _mixed((keys + STEP) ^ np.asarray(part, dtype=np.uint64))
    return keys


def uniforms(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """(n,) numbers in [0, 1), by SplitMix64 (Steele, Lea & Flood 2014), which has random access; a generator per row
    would cost more than the draws of a short row.

    Args:
        keys: (n,) keys of the sequences, see `row_hashes`.
        numbers: (n,) indices in the sequences.
    """
    drawn = np.empty(len(numbers))
    for start in range(0, len(numbers), _AT_ONCE):
        here = slice(start, start + _AT_ONCE)
        state = numbers[here].astype(np.uint64) + np.uint64(1)
        state *= STEP
        state += keys[here]
        np.multiply(_mixed(state) >> np.uint64(11), 2.0**-53, out=drawn[here])
    return drawn


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Mix the bits of each number, in place."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits
