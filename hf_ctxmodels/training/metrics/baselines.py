"""Frequency baselines on held-out text."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data import ExampleSet, ExampleStream, Mixture
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.objectives.base import BaselinePolicy
from hf_ctxmodels.training.batches import Batch, count_items

Examples = ExampleSet | ExampleStream | Mixture
_BATCHES_FOR_CLASSES = 50
_EXAMPLES_FOR_FREQUENCIES = 100_000


@dataclass(frozen=True)
class BaselineScore:
    """The score of predicting each target with its frequency in the training text.

    Attributes:
        loss: Mean cross-entropy of the held-out targets under the training frequencies, in nats.
        accuracy: Share of held-out targets equal to the most frequent training target.
    """

    loss: float
    accuracy: float


class FrequencyBaseline:
    """Counts targets in training examples, then scores the baseline on held-out batches.

    Targets with one value per example, and the policy's `token_classes`, are classes, counted in collated training
    batches. Other targets with several values per example are tokens, counted in the uncorrupted training examples,
    except the policy's `excluded_ids`. Counts are smoothed by adding 1.

    Args:
        policy: The objective's policy.
    """

    def __init__(self, policy: BaselinePolicy) -> None:
        self._policy = policy
        self.tokens = np.zeros(policy.num_tokens)
        """(num_tokens,) counts of the tokens."""
        self._classes: dict[str, np.ndarray] = {}

    def count_tokens(self, examples: Iterable[Mapping[str, Any]]) -> None:
        """Count the tokens of training examples, before collation."""
        for example in examples:
            self.tokens += np.bincount(example[self._policy.column], minlength=len(self.tokens))

    def count_classes(self, batch: Batch, targets: Sequence[str]) -> None:
        """Count the `targets` that are classes in a collated training batch."""
        for name in set(targets) & set(batch):
            target = batch[name]
            if self._are_classes(name, target) and not target.is_floating_point():
                self._classes[name] = _sum(self._classes.get(name), np.bincount(target[target >= 0].cpu().numpy()))

    def _are_classes(self, name: str, target: torch.Tensor) -> bool:
        return target.ndim == 1 or name in self._policy.token_classes

    def scores(self, batches: Iterable[Batch], targets: Sequence[str]) -> dict[str, BaselineScore]:
        """Scores of the `targets` (names in a batch) that occur in the held-out batches."""
        totals: dict[str, np.ndarray] = {}
        per_token: set[str] = set()
        for batch in batches:
            for name in set(targets) & set(batch):
                values = batch[name][batch[name] != IGNORE_INDEX].cpu().numpy()
                totals[name] = _sum(totals.get(name), np.bincount(values))
                per_token |= set() if self._are_classes(name, batch[name]) else {name}
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
    """Frequency baselines on the held-out examples: `{"baseline_<term>": ...}` for the `metrics` of a model.

    Args:
        objective: The pretraining objective.
        examples, held_out: Training and held-out examples.
        model: The model, for its `loss_targets`.
        metrics: The model's evaluation.
        batch_size: Examples per batch.
    """
    policy, targets = objective.baseline, model.loss_targets
    baseline = FrequencyBaseline(policy)
    for batch in sample_batches(examples, _EXAMPLES_FOR_FREQUENCIES, batch_size):
        baseline.count_tokens(batch)
    batches = (objective.collate(batch) for batch in sample_batches(held_out, len(held_out), batch_size))
    if policy.scores is not None:
        scores = torch.from_numpy(policy.scores(baseline.tokens)).float()
        return {"baseline_loss": _loss_by_scores(model, scores, batches)}
    for batch in sample_batches(examples, _BATCHES_FOR_CLASSES * batch_size, batch_size):
        baseline.count_classes(objective.collate(batch), targets)
    scores_by_target = baseline.scores(batches, targets if policy.targets is None else policy.targets)
    return named_baselines(scores_by_target, targets, metrics, getattr(model, "loss_terms", None))


@torch.no_grad()
def _loss_by_scores(model: Any, scores: torch.Tensor, batches: Iterable[Batch]) -> float:
    """Mean loss of an input-independent prediction; see `BaselinePolicy.scores`."""
    (target,) = model.loss_targets
    total, number = 0.0, 0
    for batch in batches:
        total += float(model.loss_by_scores(scores, **batch))
        number += int(count_items([batch], [target])[0])
    return total / max(1, number)


def sample_batches(examples: Examples, number: int, batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """At most `number` examples of epoch 0 in batches: evenly spaced in a set, the first ones of a stream."""
    sample: Iterator[dict[str, Any]]
    if isinstance(examples, ExampleStream):
        sample = islice(examples.one_pass(0), number)
    else:
        indices = np.linspace(0, len(examples) - 1, min(number, len(examples))).astype(int)
        sample = (examples[0, index] for index in indices.tolist())
    while batch := list(islice(sample, batch_size)):
        yield batch


def named_baselines(
    scores: Mapping[str, BaselineScore],
    targets: Sequence[str],
    metrics: Mapping[str, float],
    terms: Sequence[str] | None = None,
) -> dict[str, float]:
    """The scores by the names of the metrics: `eval_mlm_loss` -> `baseline_mlm_loss`.

    A term with an F1 detects positives, which are not in the batches. With their share p (`eval_..._share`), the
    baseline of the loss predicts p everywhere, and the baseline of F1 predicts positives everywhere.

    Args:
        scores: Scores by target.
        targets: The head's `loss_targets`, in the order of the loss terms.
        metrics: From `LossEvaluation`.
        terms: Names of the loss terms, for heads whose batches may lack targets; None for the terms in `metrics`.
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
            named[f"baseline_{term}"] = -sum(p * math.log(p) for p in (share, 1 - share) if p)
            named[f"baseline_{stem}f1"] = 2 * share / (1 + share)
        elif target in scores:
            named[f"baseline_{term}"] = scores[target].loss
            if f"eval_{accuracy}" in metrics:
                named[f"baseline_{accuracy}"] = scores[target].accuracy
    return named


def _score(training: np.ndarray, held_out: np.ndarray) -> BaselineScore:
    """The score of training counts, (classes,), on the counts of held-out targets, (at most classes,)."""
    (present,) = held_out.nonzero()
    share = held_out / held_out.sum()
    with np.errstate(divide="ignore"):  # an excluded token as a target has an infinite loss
        losses = -np.log(training / training.sum())
    most_frequent = int(training.argmax())
    accuracy = float(share[most_frequent]) if most_frequent < len(share) else 0.0
    return BaselineScore(loss=float(share[present] @ losses[present]), accuracy=accuracy)


def _sum(counts: np.ndarray | None, new_counts: np.ndarray) -> np.ndarray:
    """The sum of counts of different lengths."""
    counts = np.zeros(0) if counts is None else counts
    size = max(len(counts), len(new_counts))
    return np.pad(counts, (0, size - len(counts))) + np.pad(new_counts, (0, size - len(new_counts)))
