"""`window_draws` compiled for the CPU by numba (extra `words`): numpy draws take as long as training."""

import numpy as np
from numba import njit

from hf_ctxmodels.data.seeding import FIRST, SECOND, STEP
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX

_AT_ONCE = 2048  # numbers drawn at a time, vectorised, before the table look-ups


@njit(nogil=True, cache=True, inline="always")
def _uniform(key: np.uint64, number: int) -> float:
    """See `seeding.uniforms`."""
    bits = key + np.uint64(number + 1) * STEP
    bits = (bits ^ (bits >> np.uint64(30))) * FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * SECOND
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53


@njit(nogil=True, cache=True)
def keep(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See `window_draws.keep`."""
    kept, left = np.empty_like(ids), np.zeros_like(lengths)
    start, end = 0, 0
    for row in range(len(lengths)):
        stop = start + lengths[row]
        for place in range(start, stop):
            kept[end + left[row]] = ids[place]  # overwritten by the next word, unless it is kept
            left[row] += _uniform(keys[row], place - start) < shares[ids[place]]
        if left[row] == 0:
            kept[end], left[row] = ids[start], 1
            for place in range(start + 1, stop):
                if counts[ids[place]] < counts[kept[end]]:
                    kept[end] = ids[place]
        start = stop
        end += left[row]
    return kept[:end], left


@njit(nogil=True, cache=True)
def spread(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """See `window_draws.spread`."""
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORE_INDEX, dtype=np.int64), np.ones(size, dtype=np.int64)
    start = 0
    for row in range(len(lengths)):
        for place in range(lengths[row]):
            here = first[row] + place
            words[here] = labels[here] = ids[start + place]
            mask[here] = 1
            windows[here] = 1 + np.int64(_uniform(keys[row], place) * window)
        start += lengths[row]
    return words, mask, labels, windows


@njit(nogil=True, cache=True)
def negatives(
    blocks: np.ndarray, first: np.ndarray, keys: np.ndarray, table: np.ndarray, each: int, size: int
) -> np.ndarray:
    """See `window_draws.negatives`."""
    result = np.zeros((size, each), dtype=np.int64)
    flat, some = result.reshape(-1), np.empty(_AT_ONCE)
    for row in range(len(blocks)):
        begin, number = first[row] * each, blocks[row] * each
        for start in range(0, number, _AT_ONCE):
            count = min(_AT_ONCE, number - start)
            for k in range(count):
                some[k] = _uniform(keys[row], start + k) * len(table)
            for k in range(count):
                place = np.int64(some[k])
                own, other = some[k] - place < table[place, 0], np.int64(table[place, 1])
                flat[begin + start + k] = place if own else other
    return result
