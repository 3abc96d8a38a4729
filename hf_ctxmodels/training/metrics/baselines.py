"""The frequency baseline: what a prediction that reads no input reaches on held-out text."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.data import ExampleSet, ExampleStream, Mixture
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.training.batches import Batch, count_items

Examples = ExampleSet | ExampleStream | Mixture
_BATCHES_FOR_CLASSES = 50
_ROWS_FOR_FREQUENCIES = 100_000


@dataclass(frozen=True)
class BaselineScore:
    """What predicting every target by its frequency in the training text reaches, whatever the input.

    Attributes:
        loss: mean over the held-out targets, in nats: their cross-entropy under the training frequencies.
        accuracy: share of the held-out targets that are the most frequent one of training.
    """

    loss: float
    accuracy: float


class FrequencyBaseline:
    """Counts training rows, then scores the prediction by frequency for every target of held-out batches.

    A target with one value per row is a class of the row; it is counted in collated training batches. One with several
    values per row is a token; it is counted among all tokens of the training rows before their corruption, except the
    policy's `excluded_ids`. Each token or class counts once more than it occurs, so that none is impossible.

    Args:
        policy: the objective's.
    """

    def __init__(self, policy: BaselinePolicy) -> None:
        self._policy = policy
        self.tokens = np.zeros(policy.num_tokens)
        """(num_tokens,) how often each token was counted."""
        self._classes: dict[str, np.ndarray] = {}

    def count_tokens(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the tokens of training rows, before collation."""
        for row in rows:
            self.tokens += np.bincount(row[self._policy.column], minlength=len(self.tokens))

    def count_classes(self, batch: Batch, targets: Sequence[str]) -> None:
        """Count those of the `targets` that a collated training batch holds once per row."""
        for name in set(targets) & set(batch):
            target = batch[name]
            if target.ndim == 1 and not target.is_floating_point():
                self._classes[name] = _sum(self._classes.get(name), np.bincount(target[target >= 0].cpu().numpy()))

    def scores(self, batches: Iterable[Batch], targets: Sequence[str]) -> dict[str, BaselineScore]:
        """The score on each of the `targets` (names in a batch) that the held-out batches hold."""
        totals: dict[str, np.ndarray] = {}
        per_token: set[str] = set()
        for batch in batches:
            for name in set(targets) & set(batch):
                values = batch[name][batch[name] != IGNORED].cpu().numpy()
                totals[name] = _sum(totals.get(name), np.bincount(values))
                per_token |= {name} if batch[name].ndim > 1 else set()
        tokens = self.tokens + 1
        tokens[list(self._policy.excluded_ids)] = 0
        return {
            name: _score(tokens if name in per_token else _sum(self._classes.get(name), np.ones(len(counts))), counts)
            for name, counts in totals.items()
            if counts.any()
        }


def frequency_baselines(
    objective: Objective,
    examples: Examples,
    held_out: ExampleSet,
    model: Any,
    metrics: Mapping[str, float],
    batch_size: int,
) -> dict[str, float]:
    """The frequency baseline on the held-out examples: `{"baseline_<term>": ...}` for the `metrics` of a model."""
    policy, targets = objective.baseline, model.loss_targets
    baseline = FrequencyBaseline(policy)
    for rows in sample_rows(examples, _ROWS_FOR_FREQUENCIES, batch_size):
        baseline.count_tokens(rows)
    batches = (objective.collate(rows) for rows in sample_rows(held_out, len(held_out), batch_size))
    if policy.scores is not None:
        scores = torch.from_numpy(policy.scores(baseline.tokens)).float()
        return {"baseline_loss": _loss_by_scores(model, scores, batches)}
    for rows in sample_rows(examples, _BATCHES_FOR_CLASSES * batch_size, batch_size):
        baseline.count_classes(objective.collate(rows), targets)
    scored = baseline.scores(batches, targets if policy.targets is None else policy.targets)
    return named_baselines(scored, targets, metrics, getattr(model, "loss_terms", None))


@torch.no_grad()
def _loss_by_scores(model: Any, scores: torch.Tensor, batches: Iterable[Batch]) -> float:
    """Mean loss of a prediction that does not depend on the input; see `BaselinePolicy.scores`."""
    (target,) = model.loss_targets
    total, number = 0.0, 0
    for batch in batches:
        total += float(model.loss_by_scores(scores, **batch))
        number += int(count_items([batch], [target])[0])
    return total / max(1, number)


def sample_rows(examples: Examples, number: int, batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """At most `number` rows of epoch 0 in batches: spread evenly over a set, the first ones of a stream."""
    rows: Iterator[dict[str, Any]]
    if isinstance(examples, ExampleStream):
        rows = islice(examples.one_pass(0), number)
    else:
        places = np.linspace(0, len(examples) - 1, min(number, len(examples))).astype(int)
        rows = (examples[0, place] for place in places.tolist())
    while batch := list(islice(rows, batch_size)):
        yield batch


def named_baselines(
    scores: Mapping[str, BaselineScore],
    targets: Sequence[str],
    metrics: Mapping[str, float],
    terms: Sequence[str] | None = None,
) -> dict[str, float]:
    """The scores under the names of the metrics they are compared with: `eval_mlm_loss` -> `baseline_mlm_loss`.

    A term with an F1 is a detector's, whose positives are made while the model runs and are in no batch. With their
    share p among its metrics (`eval_..._share`), its loss is compared with that of predicting p everywhere, and its F1
    with that of flagging everything, which is above that of flagging nothing, 0.

    Args:
        scores: by target.
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
        elif target in scores:
            named[f"baseline_{term}"] = scores[target].loss
            if f"eval_{accuracy}" in metrics:
                named[f"baseline_{accuracy}"] = scores[target].accuracy
    return named


def _score(training: np.ndarray, held_out: np.ndarray) -> BaselineScore:
    """Frequencies of training, (classes,), against the counts of held-out targets, (at most classes,)."""
    (shown,) = held_out.nonzero()
    share = held_out / held_out.sum()
    with np.errstate(divide="ignore"):  # a special token as a target, against all expectation: infinitely many nats
        nats = -np.log(training / training.sum())
    best = int(training.argmax())
    return BaselineScore(float(share[shown] @ nats[shown]), float(share[best]) if best < len(share) else 0.0)


def _sum(counts: np.ndarray | None, more: np.ndarray) -> np.ndarray:
    """Counts of different numbers of classes, added up."""
    counts = np.zeros(0) if counts is None else counts
    size = max(len(counts), len(more))
    return np.pad(counts, (0, size - len(counts))) + np.pad(more, (0, size - len(more)))
