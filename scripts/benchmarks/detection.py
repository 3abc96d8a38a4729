"""F1 of replaced token detection, and a detector without context as a baseline."""

import numpy as np


def best_threshold(scores: np.ndarray, replaced: np.ndarray) -> float:
    """Threshold on the score with the best F1.

    Args:
        scores: (tokens,) scores, higher for tokens that look replaced.
        replaced: (tokens,) bool, whether the token is replaced.
    """
    order = np.argsort(-scores, kind="stable")
    true_positives, flagged = replaced[order].cumsum(), np.arange(1, len(order) + 1)
    is_last_of_ties = np.append(scores[order][1:] != scores[order][:-1], True)
    f1 = np.where(is_last_of_ties, 2 * true_positives / (flagged + replaced.sum()), 0)
    return float(scores[order][f1.argmax()])


def f1_of_flags(flags: np.ndarray, replaced: np.ndarray) -> float:
    """F1 of (tokens,) bool flags; 0 if nothing is flagged and nothing is replaced."""
    return float(2 * (flags & replaced).sum() / max(flags.sum() + replaced.sum(), 1))


class TokenDetector:
    """Flags tokens by their identity alone: those that are often replacements in training text.

    The baseline for a detector that knows the token frequencies of the text and of the generator, but no context. The
    threshold on the fraction of replacements maximizes F1 on training text, where F1 is therefore at least as high as
    by flagging all tokens.

    Args:
        vocab_size: Number of tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size)
        self._replaced_counts = np.zeros(vocab_size)

    def count(self, input_ids: np.ndarray, replaced: np.ndarray) -> None:
        """Add training text: (tokens,) ids of the corrupted text, and whether each is a replacement."""
        self._counts += np.bincount(input_ids, minlength=len(self._counts))
        self._replaced_counts += np.bincount(input_ids[replaced], minlength=len(self._counts))

    def f1(self, input_ids: np.ndarray, replaced: np.ndarray) -> float:
        """F1 of the class "replaced" on held-out text; arguments as for `count`."""
        replaced_fraction = self._replaced_counts / np.maximum(self._counts, 1)
        order = np.argsort(-replaced_fraction, kind="stable")
        true_positives, flagged = self._replaced_counts[order].cumsum(), self._counts[order].cumsum()
        best = int((2 * true_positives / np.maximum(flagged + self._replaced_counts.sum(), 1)).argmax())
        return f1_of_flags(replaced_fraction[input_ids] >= replaced_fraction[order][best], replaced)
