"""How well replaced tokens are detected: F1, and a detector that reads no context."""

import numpy as np


def best_threshold(scores: np.ndarray, replaced: np.ndarray) -> float:
    """The score from which on to flag for the best F1.

    Args:
        scores: (tokens,), higher for what looks replaced.
        replaced: (tokens,) bool, what is.
    """
    order = np.argsort(-scores, kind="stable")
    found, flagged = replaced[order].cumsum(), np.arange(1, len(order) + 1)
    last_of_equals = np.append(scores[order][1:] != scores[order][:-1], True)
    f1 = np.where(last_of_equals, 2 * found / (flagged + replaced.sum()), 0)
    return float(scores[order][f1.argmax()])


def f1_of_flags(flags: np.ndarray, replaced: np.ndarray) -> float:
    """F1 of (tokens,) bool flags; 0 where nothing is flagged and nothing was replaced."""
    return float(2 * (flags & replaced).sum() / max(flags.sum() + replaced.sum(), 1))


class TokenDetector:
    """Flags replaced tokens by what they are alone: those that are replaced often, whatever stands around them.

    What a detector can do that knows the frequencies of tokens and of the generator's draws, and reads no context. The
    share from which on a token is flagged is the one with the best F1 on training text, so it does at least as well
    there as flagging everything.

    Args:
        vocab_size: number of tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._seen = np.zeros(vocab_size)
        self._replaced = np.zeros(vocab_size)

    def count(self, read: np.ndarray, replaced: np.ndarray) -> None:
        """Count training text: (tokens,) ids that stood there, and whether each was a replacement."""
        self._seen += np.bincount(read, minlength=len(self._seen))
        self._replaced += np.bincount(read[replaced], minlength=len(self._seen))

    def f1(self, read: np.ndarray, replaced: np.ndarray) -> float:
        """F1 of "replaced" on held-out text, given as for `count`."""
        share = self._replaced / np.maximum(self._seen, 1)
        order = np.argsort(-share, kind="stable")
        found, flagged = self._replaced[order].cumsum(), self._seen[order].cumsum()
        best = int((2 * found / np.maximum(flagged + self._replaced.sum(), 1)).argmax())
        return f1_of_flags(share[read] >= share[order][best], replaced)
