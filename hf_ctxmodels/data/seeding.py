"""The one rule of randomness in every objective.

Whatever is drawn for an example is drawn from a generator made of `(seed, epoch, example index)` and of nothing else.
No global state is read or advanced, so the number of workers, the order of a batch, the number of processes and a
resume change nothing.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What the numbers are for. Two uses of one `(seed, epoch, index)` must not share a sequence."""

    CORRUPTION = 0
    PAIRING = 1
    ORDER = 2
    HELD_OUT = 3
    SAMPLING = 4
    MIXTURE = 5


def generator(seed: int, epoch: int, index: int, stream: Stream = Stream.CORRUPTION) -> np.random.Generator:
    """A generator that depends on its arguments (all >= 0) only. Costs about ten microseconds."""
    entropy = np.random.SeedSequence((seed, epoch, index), spawn_key=(int(stream),))
    return np.random.Generator(np.random.Philox(entropy))


STEP, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_AT_ONCE = 8192  # numbers that stay in the nearest cache


def row_keys(
    seed: int, epochs: Sequence[int], indices: Sequence[int], stream: Stream = Stream.CORRUPTION, use: int = 0
) -> np.ndarray:
    """(rows,) the keys of `uniforms`: what `generator` is for one example, for all examples of a batch at once.

    Args:
        seed: >= 0.
        epochs, indices: of each example, >= 0.
        stream, use: what the numbers are for, and which of several uses.
    """
    keys = np.zeros(len(indices), dtype=np.uint64)
    for part in (seed, epochs, indices, int(stream), use):
        keys = _mixed((keys + STEP) ^ np.asarray(part, dtype=np.uint64))
    return keys


def uniforms(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """(n,) in [0, 1): of each sequence, given by its key, the number at a place.

    SplitMix64 (Steele, Lea & Flood 2014), of which any number can be had without those before it. A generator for every
    row costs more than all that a short row draws from it.

    Args:
        keys: (n,) see `row_keys`.
        numbers: (n,) integers >= 0.
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
    """Every bit of each number spread over all of it; in place."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits
