"""Random draws of word2vec for a batch of examples: subsampled words, windows, negatives.

`window_kernels` has the same functions compiled, with equal results. Examples are concatenated without padding.
"""

from typing import NamedTuple

import numpy as np

from hf_ctxmodels.data.seeding import uniforms
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.static.word_frequencies import sample_noise


class _Values(NamedTuple):
    """(n,) the `row` of each value, and its `position` in it."""

    row: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> "_Values":
        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(row, np.arange(len(row)) - (lengths.cumsum() - lengths)[row])


def keep(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Subsample each row: the kept words and their number per row. A row keeps at least its rarest word.

    Args:
        ids: (n,) words.
        lengths: (rows,) none 0.
        keys: (rows,) see `seeding.row_hashes`.
        shares: (vocabulary,) probability of keeping each word.
        counts: (vocabulary,).
    """
    every = _Values.of(lengths)
    kept = uniforms(keys[every.row], every.position) < shares[ids]
    for row in np.flatnonzero(np.bincount(every.row[kept], minlength=len(lengths)) == 0):
        positions = np.flatnonzero(every.row == row)
        kept[positions[counts[ids[positions]].argmin()]] = True
    return ids[kept], np.bincount(every.row[kept], minlength=len(lengths))


def spread(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(size,) each: words, their mask, labels, and random windows from 1 to `window`.

    Args:
        ids, lengths: The results of `keep`.
        first: (rows,) start of each row.
        keys: (rows,).
        window: Largest window.
        size: Length of the results.
        padding: Id at padding positions.
    """
    every = _Values.of(lengths)
    positions = first[every.row] + every.position
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORE_INDEX, dtype=np.int64), np.ones(size, dtype=np.int64)
    words[positions], mask[positions], labels[positions] = ids, 1, ids
    windows[positions] += (uniforms(keys[every.row], every.position) * window).astype(np.int64)
    return words, mask, labels, windows


def negatives(
    blocks: np.ndarray, first: np.ndarray, keys: np.ndarray, table: np.ndarray, each: int, size: int
) -> np.ndarray:
    """(size, each) words of the noise distribution, 0 at padding.

    Args:
        blocks, first: (rows,) number of blocks of a row, and its first block.
        keys: (rows,).
        table: See `NoiseDistribution`.
        each: Negatives of a block.
        size: Number of blocks.
    """
    every = _Values.of(blocks)
    numbers = every.position[:, None] * each + np.arange(each)
    drawn = sample_noise(uniforms(np.repeat(keys[every.row], each), numbers.ravel()), table)
    result = np.zeros((size, each), dtype=np.int64)
    result[first[every.row] + every.position] = drawn.reshape(-1, each)
    return result
