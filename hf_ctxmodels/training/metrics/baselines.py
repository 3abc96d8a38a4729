"""What guessing by frequency gets on held-out text: what a pretraining loss has to be compared with."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.training.batches import Batch


@dataclass(frozen=True)
class Guess:
    """Guessing every target by its frequency in the training text, whatever the input.

    Attributes:
        loss: mean over the held-out targets, in nats: their cross-entropy under the training frequencies.
        accuracy: share of the held-out targets that are the most frequent one of training.
    """

    loss: float
    accuracy: float


class FrequencyGuesser:
    """Counts training rows, then scores the frequency guess for every target of held-out batches.

    A target with one value per row is a class of the row; it is counted in collated training batches. One with several
    values per row is a token; it is counted among all ordinary tokens of the training rows before their corruption.
    Each token or class counts once more than it occurs, so that none is impossible.

    Args:
        vocab_size: number of tokens.
        special_ids: tokens that are never predicted.
        column: of a row, that holds its tokens.
    """

    def __init__(self, vocab_size: int, special_ids: Sequence[int], column: str = "input_ids") -> None:
        self._column = column
        self._tokens = np.zeros(vocab_size)
        self._special = list(special_ids)
        self._classes: dict[str, np.ndarray] = {}

    def count_tokens(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the tokens of training rows, before collation."""
        for row in rows:
            self._tokens += np.bincount(row[self._column], minlength=len(self._tokens))

    @property
    def tokens(self) -> np.ndarray:
        """(vocabulary,) how often each token was counted."""
        return self._tokens

    def count_classes(self, batch: Batch, targets: Sequence[str]) -> None:
        """Count those of the `targets` that a collated training batch holds once per row."""
        for name in set(targets) & set(batch):
            target = batch[name]
            if target.ndim == 1 and not target.is_floating_point():
                self._classes[name] = _sum(self._classes.get(name), np.bincount(target[target >= 0].cpu().numpy()))

    def guesses(self, batches: Iterable[Batch], targets: Sequence[str]) -> dict[str, Guess]:
        """The guess for each of the `targets` (names in a batch) that the held-out batches hold."""
        totals: dict[str, np.ndarray] = {}
        per_token: set[str] = set()
        for batch in batches:
            for name in set(targets) & set(batch):
                values = batch[name][batch[name] != IGNORED].cpu().numpy()
                totals[name] = _sum(totals.get(name), np.bincount(values))
                per_token |= {name} if batch[name].ndim > 1 else set()
        tokens = self._tokens + 1
        tokens[self._special] = 0
        return {
            name: _guess(tokens if name in per_token else _sum(self._classes.get(name), np.ones(len(counts))), counts)
            for name, counts in totals.items()
            if counts.any()
        }


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


def named_guesses(
    guesses: Mapping[str, Guess],
    targets: Sequence[str],
    metrics: Mapping[str, float],
    terms: Sequence[str] | None = None,
) -> dict[str, float]:
    """The guesses under the names of the metrics they compare with: `eval_mlm_loss` -> `baseline_mlm_loss`.

    A term with an F1 is a detector's: what is to be found is made while the model runs, and stands in no batch. Where
    its metrics say how much there was (`eval_..._share`), its loss compares with that of saying so everywhere, and its
    F1 with that of flagging everything, which is above that of flagging nothing, 0.

    Args:
        guesses: by target.
        targets: the head's `loss_targets`; the terms of its loss are in their order.
        metrics: of `LossEvaluation`.
        terms: the names of the loss's terms, of a head whose batches do not hold all targets; None for those that the
            metrics have.
    """
    if terms is None:
        terms = [name.removeprefix("eval_") for name in metrics if name.endswith("_loss") and name != "eval_loss"]
    named = {}
    for target, term in zip(targets, terms or ["loss"], strict=True):
        if f"eval_{term}" not in metrics:
            continue
        stem = term.removesuffix("loss")
        accuracy = f"{stem}accuracy"
        if f"eval_{stem}f1" in metrics:
            share = metrics[f"eval_{stem}share"]
            named[f"baseline_{term}"] = -sum(part * math.log(part) for part in (share, 1 - share) if part)
            named[f"baseline_{stem}f1"] = 2 * share / (1 + share)
        elif target in guesses:
            named[f"baseline_{term}"] = guesses[target].loss
            if f"eval_{accuracy}" in metrics:
                named[f"baseline_{accuracy}"] = guesses[target].accuracy
    return named


def _guess(training: np.ndarray, held_out: np.ndarray) -> Guess:
    """Frequencies of training, (classes,), against the counts of held-out targets, (at most classes,)."""
    (shown,) = held_out.nonzero()
    share = held_out / held_out.sum()
    with np.errstate(divide="ignore"):  # a special token as a target, against all expectation: infinitely many nats
        nats = -np.log(training / training.sum())
    best = int(training.argmax())
    return Guess(float(share[shown] @ nats[shown]), float(share[best]) if best < len(share) else 0.0)


def _sum(counts: np.ndarray | None, more: np.ndarray) -> np.ndarray:
    """Counts of different numbers of classes, added up."""
    counts = np.zeros(0) if counts is None else counts
    size = max(len(counts), len(more))
    return np.pad(counts, (0, size - len(counts))) + np.pad(more, (0, size - len(more)))
