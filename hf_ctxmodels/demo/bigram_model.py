"""Bigram model, the baseline of the masked language model: it predicts a token from one neighbour."""

from collections.abc import Iterable

import numpy as np


class BigramModel:
    """P(token | neighbour) with interpolated Kneser-Ney smoothing (Kneser & Ney 1995; Chen & Goodman 1999, sec. 2.7).

    The discount is n1 / (n1 + 2 n2), where n1 and n2 are the numbers of pairs that occur once and twice. Every possible
    target has a non-zero probability.

    Args:
        sequences: (tokens,) ids of the training sequences.
        vocab_size: Number of tokens.
        excluded_ids: Tokens that are never targets.
        left: Whether the neighbour is the previous token; else the next token.
    """

    def __init__(
        self, sequences: Iterable[np.ndarray], vocab_size: int, excluded_ids: Iterable[int], *, left: bool = True
    ) -> None:
        self._size = vocab_size
        keys = np.concatenate([_pairs(ids, left) @ np.array([vocab_size, 1]) for ids in sequences])
        allowed = np.ones(vocab_size, dtype=bool)
        allowed[list(excluded_ids)] = False
        self._keys, self._counts = np.unique(keys[allowed[keys % vocab_size]], return_counts=True)
        once, twice = (self._counts == 1).sum(), (self._counts == 2).sum()
        self._discount = once / max(1, once + 2 * twice)
        contexts, targets = np.divmod(self._keys, vocab_size)
        self._totals = np.bincount(contexts, weights=self._counts, minlength=vocab_size)
        self._num_successors = np.bincount(contexts, minlength=vocab_size)
        continuations = np.bincount(targets, minlength=vocab_size) + 0.1 * allowed
        self._continuation = continuations / continuations.sum()

    def probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """(targets,) probabilities of the targets given their neighbours, both (targets,) ids."""
        keys = contexts.astype(np.int64) * self._size + targets
        indices = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        counts = np.where(self._keys[indices] == keys, self._counts[indices], 0)
        totals, backoff = self._totals[contexts], self._continuation[targets]
        mass = np.maximum(counts - self._discount, 0) + self._discount * self._num_successors[contexts] * backoff
        return np.where(totals > 0, mass / np.maximum(totals, 1), backoff)


def _pairs(ids: np.ndarray, left: bool) -> np.ndarray:
    """(tokens - 1, 2) pairs of a neighbour and its token."""
    ids = ids.astype(np.int64)
    return np.stack([ids[:-1], ids[1:]] if left else [ids[1:], ids[:-1]], axis=1)
