"""A bigram model as the baseline of a masked language model: a word is guessed from its neighbour."""

from collections.abc import Iterable

import numpy as np


class BigramModel:
    """P(token | neighbour) by interpolated Kneser-Ney smoothing (Kneser & Ney 1995; Chen & Goodman 1999, section 2.7).

    The discount is n1 / (n1 + 2 n2), from the numbers of pairs seen once and twice. Every token that may be a target
    has a small probability.

    Args:
        rows: (tokens,) ids of each row of the training text.
        vocab_size: Number of tokens.
        never: Ids that are never targets.
        left: Whether the neighbour is the token before; else the token after.
    """

    def __init__(self, rows: Iterable[np.ndarray], vocab_size: int, never: Iterable[int], *, left: bool = True) -> None:
        self._size = vocab_size
        keys = np.concatenate([_pairs(row, left) @ np.array([vocab_size, 1]) for row in rows])
        allowed = np.ones(vocab_size, dtype=bool)
        allowed[list(never)] = False
        self._keys, self._counts = np.unique(keys[allowed[keys % vocab_size]], return_counts=True)
        once, twice = (self._counts == 1).sum(), (self._counts == 2).sum()
        self._discount = once / max(1, once + 2 * twice)
        contexts, targets = np.divmod(self._keys, vocab_size)
        self._totals = np.bincount(contexts, weights=self._counts, minlength=vocab_size)
        self._kinds = np.bincount(contexts, minlength=vocab_size)
        continuations = np.bincount(targets, minlength=vocab_size) + 0.1 * allowed
        self._continuation = continuations / continuations.sum()

    def probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """(targets,) probability of each target beside its context, both (targets,) ids."""
        keys = contexts.astype(np.int64) * self._size + targets
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        counts = np.where(self._keys[places] == keys, self._counts[places], 0)
        totals, backed_off = self._totals[contexts], self._continuation[targets]
        seen = np.maximum(counts - self._discount, 0) + self._discount * self._kinds[contexts] * backed_off
        return np.where(totals > 0, seen / np.maximum(totals, 1), backed_off)


def _pairs(row: np.ndarray, left: bool) -> np.ndarray:
    """(tokens - 1, 2) each token's neighbour and the token."""
    row = row.astype(np.int64)
    return np.stack([row[:-1], row[1:]] if left else [row[1:], row[:-1]], axis=1)
