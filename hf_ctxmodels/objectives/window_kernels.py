"""`window_sampling` compiled for the CPU by numba (extra `words`): with numpy, sampling takes as long as training."""

import numpy as np
from numba import njit

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data.seeding import FIRST, SECOND, STEP

_CHUNK = 2048  # numbers sampled at a time, vectorized, before the table look-ups


@njit(nogil=True, cache=True, inline="always")
def _uniform(key: np.uint64, number: int) -> float:
    """A number of `seeding.uniforms`."""
    bits = key + np.uint64(number + 1) * STEP
    bits = (bits ^ (bits >> np.uint64(30))) * FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * SECOND
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53


@njit(nogil=True, cache=True)
def subsample(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`window_sampling.subsample`, compiled."""
    words, counts_by_row = np.empty_like(ids), np.zeros_like(lengths)
    start, end = 0, 0
    for row in range(len(lengths)):
        stop = start + lengths[row]
        for position in range(start, stop):
            words[end + counts_by_row[row]] = ids[position]  # overwritten by the next word, unless it is kept
            counts_by_row[row] += _uniform(keys[row], position - start) < shares[ids[position]]
        if counts_by_row[row] == 0:
            words[end], counts_by_row[row] = ids[start], 1
            for position in range(start + 1, stop):
                if counts[ids[position]] < counts[words[end]]:
                    words[end] = ids[position]
        start = stop
        end += counts_by_row[row]
    return words[:end], counts_by_row


@njit(nogil=True, cache=True)
def place_words(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`window_sampling.place_words`, compiled."""
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORE_INDEX, dtype=np.int64), np.ones(size, dtype=np.int64)
    start = 0
    for row in range(len(lengths)):
        for position in range(lengths[row]):
            column = first[row] + position
            words[column] = labels[column] = ids[start + position]
            mask[column] = 1
            windows[column] = 1 + np.int64(_uniform(keys[row], position) * window)
        start += lengths[row]
    return words, mask, labels, windows


@njit(nogil=True, cache=True)
def sample_negatives(
    blocks: np.ndarray, first: np.ndarray, keys: np.ndarray, table: np.ndarray, per_block: int, size: int
) -> np.ndarray:
    """`window_sampling.sample_negatives`, compiled."""
    result = np.zeros((size, per_block), dtype=np.int64)
    flat, scaled = result.reshape(-1), np.empty(_CHUNK)
    for row in range(len(blocks)):
        begin, number = first[row] * per_block, blocks[row] * per_block
        for start in range(0, number, _CHUNK):
            count = min(_CHUNK, number - start)
            for k in range(count):
                scaled[k] = _uniform(keys[row], start + k) * len(table)
            for k in range(count):
                slot = np.int64(scaled[k])
                flat[begin + start + k] = slot if scaled[k] - slot < table[slot, 0] else np.int64(table[slot, 1])
    return result
