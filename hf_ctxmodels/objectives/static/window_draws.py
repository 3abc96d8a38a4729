"""What is drawn for word2vec, for the rows of a batch at once: kept words, windows, negatives.

`window_kernels` is the same compiled, number for number. Rows are concatenated, without padding.
"""

from typing import NamedTuple

import numpy as np

from hf_ctxmodels.data.seeding import uniforms
from hf_ctxmodels.objectives.common.masking import IGNORED
from hf_ctxmodels.objectives.static.noise import draw_noise


class _Values(NamedTuple):
    """(n,) the `row` of each value, and its `place` in it."""

    row: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> "_Values":
        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(row, np.arange(len(row)) - (lengths.cumsum() - lengths)[row])


def keep(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What stays of each row, and its lengths; if nothing does, the rarest word.

    Args:
        ids: (n,) words.
        lengths: (rows,) none 0.
        keys: (rows,) see `seeding.row_keys`.
        shares: (vocabulary,) chance of each word to stay.
        counts: (vocabulary,).
    """
    every = _Values.of(lengths)
    stays = uniforms(keys[every.row], every.place) < shares[ids]
    for row in np.flatnonzero(np.bincount(every.row[stays], minlength=len(lengths)) == 0):
        here = np.flatnonzero(every.row == row)
        stays[here[counts[ids[here]].argmin()]] = True
    return ids[stays], np.bincount(every.row[stays], minlength=len(lengths))


def spread(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(size,) each: words, where there are any, labels, and windows, 1 to `window`, drawn.

    Args:
        ids, lengths: as `keep` gives them.
        first: (rows,) where each row begins.
        keys: (rows,).
        window: largest.
        size: of the result.
        padding: id where there is no word.
    """
    every = _Values.of(lengths)
    places = first[every.row] + every.place
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORED, dtype=np.int64), np.ones(size, dtype=np.int64)
    words[places], mask[places], labels[places] = ids, 1, ids
    windows[places] += (uniforms(keys[every.row], every.place) * window).astype(np.int64)
    return words, mask, labels, windows


def negatives(
    blocks: np.ndarray,
    first: np.ndarray,
    keys: np.ndarray,
    table: np.ndarray,
    each: int,
    size: int,
) -> np.ndarray:
    """(size, each) words of the noise distribution, 0 where there is no row.

    Args:
        blocks, first: (rows,) how many blocks a row has, and which is its first.
        keys: (rows,).
        table: see `NoiseDistribution`.
        each: negatives of a block.
        size: blocks of the result.
    """
    every = _Values.of(blocks)
    numbers = every.place[:, None] * each + np.arange(each)
    drawn = draw_noise(uniforms(np.repeat(keys[every.row], each), numbers.ravel()), table)
    result = np.zeros((size, each), dtype=np.int64)
    result[first[every.row] + every.place] = drawn.reshape(-1, each)
    return result
