"""Sampling of word2vec for a batch of examples: subsampled words, windows, negatives.

`window_kernels` has the same functions compiled, with equal results. Examples are concatenated without padding.
"""

from typing import NamedTuple

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data.seeding import uniforms
from hf_ctxmodels.objectives.static.word_frequencies import sample_noise


class _Positions(NamedTuple):
    """(n,) the `row` of each value, and its `position` in the row."""

    row: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> "_Positions":
        row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(row, np.arange(len(row)) - (lengths.cumsum() - lengths)[row])


def subsample(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Subsample each row: the remaining words and their number per row, at least the rarest word of each.

    Args:
        ids: (n,) words.
        lengths: (rows,) none 0.
        keys: (rows,) see `seeding.row_hashes`.
        shares: (vocabulary,) probability of keeping each word.
        counts: (vocabulary,).
    """
    values = _Positions.of(lengths)
    is_kept = uniforms(keys[values.row], values.position) < shares[ids]
    for row in np.flatnonzero(np.bincount(values.row[is_kept], minlength=len(lengths)) == 0):
        positions = np.flatnonzero(values.row == row)
        is_kept[positions[counts[ids[positions]].argmin()]] = True
    return ids[is_kept], np.bincount(values.row[is_kept], minlength=len(lengths))


def place_words(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(size,) each: words, their mask, labels, and random windows from 1 to `window`.

    Args:
        ids, lengths: The results of `subsample`.
        first: (rows,) start of each row.
        keys: (rows,).
        window: Largest window.
        size: Length of the results.
        padding: Id at padding positions.
    """
    values = _Positions.of(lengths)
    positions = first[values.row] + values.position
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORE_INDEX, dtype=np.int64), np.ones(size, dtype=np.int64)
    words[positions], mask[positions], labels[positions] = ids, 1, ids
    windows[positions] += (uniforms(keys[values.row], values.position) * window).astype(np.int64)
    return words, mask, labels, windows


def sample_negatives(
    blocks: np.ndarray, first: np.ndarray, keys: np.ndarray, table: np.ndarray, per_block: int, size: int
) -> np.ndarray:
    """(size, per_block) words of the noise distribution, 0 at padding.

    Args:
        blocks, first: (rows,) number of blocks of a row, and its first block.
        keys: (rows,).
        table: See `NoiseDistribution`.
        per_block: Negatives of a block.
        size: Number of blocks.
    """
    values = _Positions.of(blocks)
    numbers = values.position[:, None] * per_block + np.arange(per_block)
    words = sample_noise(uniforms(np.repeat(keys[values.row], per_block), numbers.ravel()), table)
    result = np.zeros((size, per_block), dtype=np.int64)
    result[first[values.row] + values.position] = words.reshape(-1, per_block)
    return result
