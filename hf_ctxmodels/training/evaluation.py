"""The loss on held-out examples, and frequency baselines."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data import ExampleSet, ExampleStream, Mixture
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.objectives.base import BaselineOptions
from hf_ctxmodels.training.accelerator import unwrap_model
from hf_ctxmodels.training.training_step import (
    INDEX_KEY,
    Batch,
    Collate,
    IndexedCollator,
    count_items,
    logged_terms,
    loss_targets,
)

Examples = ExampleSet | ExampleStream | Mixture
_BATCHES_FOR_CLASSES = 50
_EXAMPLES_FOR_FREQUENCIES = 100_000
_EXAMPLES_FOR_TRAINING_BASELINES = 2_000


class LossEvaluation:
    """Evaluation for the training loop: `{"eval_loss": ..., "eval_<component>_loss": ...}` over all examples, which are
    indexed by `(epoch, index)`.

    All evaluations use the masks of epoch 0. Each term is the mean over all its targets in the set, whatever the
    batches, and each metric the ratio of its counts over the set.
    """

    def __init__(self, examples: Dataset, collate: Collate, batch_size: int) -> None:
        self._examples, self._collate, self._batch_size = examples, IndexedCollator(collate), batch_size
        self._target_counts: dict[str, float] | None = None

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate; a collective call, with the same values on all processes."""
        unwrapped = unwrap_model(accelerator, model)
        has_logits_option = "return_logits" in inspect.signature(unwrapped.forward).parameters
        options = {"return_logits": False} if has_logits_option else {}
        if self._target_counts is None:
            targets = loss_targets(unwrapped)
            batches = self._batches(accelerator, "counting targets")
            counts = [count_items([batch], targets) for batch, is_counted in batches if is_counted]
            zero = torch.zeros(len(targets) + 1, dtype=torch.int64, device=accelerator.device)
            totals = accelerator.reduce(torch.stack([zero, *counts]).sum(dim=0), reduction="sum").tolist()
            self._target_counts = {name: max(total, 1) for name, total in zip(targets, totals, strict=False)}
        sums: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for batch, is_counted in self._batches(accelerator, "evaluating"):
                output = model(**batch, **options, num_items_in_batch=self._target_counts)
                for name, value in logged_terms(output).items():
                    value = value.detach().float() * is_counted
                    sums[name] = sums[name] + value if name in sums else value
        results = {}
        for name, value in sums.items():
            value = accelerator.reduce(value, reduction="sum")
            if value.ndim == 0:
                results[f"eval_{name}"] = value.item()
            elif value[1]:
                results[f"eval_{name}"] = (value[0] / value[1]).item()
        return results

    def _batches(self, accelerator: Accelerator, description: str) -> Iterator[tuple[Batch, bool]]:
        """This process's batches, and whether each is counted; see `batches_of_process`."""
        size = len(self._examples)  # type: ignore[arg-type]
        starts = range(0, size, self._batch_size)
        chunks = [[(0, index) for index in range(start, min(start + self._batch_size, size))] for start in starts]
        numbers = batches_of_process(len(chunks), accelerator)
        loader = DataLoader(
            self._examples,
            batch_sampler=[chunks[number] for number, _ in numbers],
            collate_fn=self._collate,
            generator=torch.Generator().manual_seed(0),
        )
        bar = progress_bar(loader, description, unit="batches", enabled=accelerator.is_main_process)
        for (_, is_counted), batch in zip(numbers, bar, strict=True):
            del batch[INDEX_KEY]
            yield send_to_device(batch, accelerator.device, non_blocking=True), is_counted


def batches_of_process(num_batches: int, accelerator: Accelerator) -> list[tuple[int, bool]]:
    """The number of each batch of this process, and whether it is counted: a process without further batches repeats
    the last one, since sharded models need the same number of forward passes on all processes.

    For example, 4 batches on 3 processes: 0 and 3 on the first, 1 and 3 on the second, 2 and 3 on the third process,
    with batch 3 counted only on the first.
    """
    passes = math.ceil(num_batches / accelerator.num_processes)
    numbers = range(accelerator.process_index, passes * accelerator.num_processes, accelerator.num_processes)
    return [(min(number, num_batches - 1), number < num_batches) for number in numbers]


class BaselineScore(NamedTuple):
    """Mean cross-entropy (nats) and accuracy of predicting each target with its frequency in the training text."""

    loss: float
    accuracy: float


class FrequencyBaseline:
    """Counts targets in training examples, then scores the baseline on held-out batches.

    Targets with one value per example, and the options' `token_classes`, are counted in collated training batches,
    other targets in the uncorrupted training examples, except the options' `excluded_ids`. Counts are increased by 1.

    Attributes:
        tokens: (num_tokens,) counts of the tokens.
    """

    def __init__(self, options: BaselineOptions) -> None:
        self._options = options
        self.tokens = np.zeros(options.num_tokens)
        self._classes: dict[str, np.ndarray] = {}

    def count_tokens(self, examples: Iterable[Mapping[str, Any]]) -> None:
        """Count the tokens of training examples, before collation."""
        for example in examples:
            self.tokens += np.bincount(example[self._options.column], minlength=len(self.tokens))

    def count_classes(self, batch: Batch, targets: Sequence[str]) -> None:
        """Count the `targets` that are classes in a collated training batch."""
        for name in set(targets) & set(batch):
            target = batch[name]
            if self._are_classes(name, target) and not target.is_floating_point():
                self._classes[name] = _sum(self._classes.get(name), np.bincount(target[target >= 0].cpu().numpy()))

    def _are_classes(self, name: str, target: torch.Tensor) -> bool:
        return target.ndim == 1 or name in self._options.token_classes

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
        tokens[list(self._options.excluded_ids)] = 0
        scores = {}
        for name, held_out in totals.items():
            (present,) = held_out.nonzero()
            if not len(present):
                continue
            training = tokens if name in per_token else _sum(self._classes.get(name), np.ones(len(held_out)))
            share = held_out / held_out.sum()
            with np.errstate(divide="ignore"):  # an excluded token as a target has an infinite loss
                losses = -np.log(training / training.sum())
            most_frequent = int(training.argmax())
            accuracy = float(share[most_frequent]) if most_frequent < len(share) else 0.0
            scores[name] = BaselineScore(float(share[present] @ losses[present]), accuracy)
        return scores


def _sum(counts: np.ndarray | None, new_counts: np.ndarray) -> np.ndarray:
    """The sum of counts of different lengths."""
    counts = np.zeros(0) if counts is None else counts
    size = max(len(counts), len(new_counts))
    return np.pad(counts, (0, size - len(counts))) + np.pad(new_counts, (0, size - len(new_counts)))


@torch.no_grad()
def frequency_baselines(
    objective: Objective,
    examples: Examples,
    held_out: Examples,
    model: Any,
    metrics: Mapping[str, float],
    batch_size: int,
    num_examples: int = _EXAMPLES_FOR_FREQUENCIES,
    num_held_out: int | None = None,
) -> dict[str, float]:
    """Frequency baselines on the held-out examples: `{"baseline_<term>": ...}` for the `metrics` of a model.

    At most `num_examples` training examples are counted, and `num_held_out` held-out examples predicted; by default all
    of a set, and `num_examples` of a stream.
    """
    options, targets = objective.baseline, model.loss_targets
    baseline = FrequencyBaseline(options)
    for batch in sample_batches(examples, num_examples, batch_size):
        baseline.count_tokens(batch)
    size = num_held_out or (len(held_out) if isinstance(held_out, ExampleSet) else num_examples)
    batches = (objective.collate(batch) for batch in sample_batches(held_out, size, batch_size))
    if options.scores is not None:  # the mean loss of an input-independent prediction
        scores = torch.from_numpy(options.scores(baseline.tokens)).float()
        total, number = 0.0, 0
        for held_out_batch in batches:
            total += float(model.loss_by_scores(scores, **held_out_batch))
            number += int(count_items([held_out_batch], targets)[0])
        return {"baseline_loss": total / max(1, number)}
    for batch in sample_batches(examples, _BATCHES_FOR_CLASSES * batch_size, batch_size):
        baseline.count_classes(objective.collate(batch), targets)
    scores_by_target = baseline.scores(batches, targets if options.targets is None else options.targets)
    return named_baselines(scores_by_target, targets, metrics, getattr(model, "loss_terms", None))


def training_baselines(
    objective: Objective, examples: Examples, model: Any, record: Mapping[str, float], batch_size: int
) -> dict[str, float]:
    """`record`, a log record of the training loss, as `eval_<term>`, with the frequency baselines of a sample of the
    training examples; empty if its terms are not the losses of the model's targets."""
    terms = getattr(model, "loss_terms", None) or [name for name in record if name.endswith("_loss")] or ["loss"]
    if len(terms) != len(model.loss_targets) or objective.baseline.scores is not None:
        return {}
    metrics = {f"eval_{name}": value for name, value in record.items()}
    sizes = _EXAMPLES_FOR_TRAINING_BASELINES, _EXAMPLES_FOR_TRAINING_BASELINES
    return metrics | frequency_baselines(objective, examples, examples, model, metrics, batch_size, *sizes)


def unlearned_losses(metrics: Mapping[str, float]) -> list[str]:
    """A sentence for each loss in `metrics` (`eval_<term>`) that is not below its baseline (`baseline_<term>`)."""
    return [
        f"the {term} {metrics[f'eval_{term}']:.4g} is not below {baseline:.4g}, the loss of predicting frequencies"
        for term, baseline in ((name.removeprefix("baseline_"), value) for name, value in metrics.items())
        if f"baseline_{term}" in metrics and term.endswith("loss") and metrics[f"eval_{term}"] >= baseline
    ]


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
    """The scores of targets by the names of the metrics of `LossEvaluation`: `eval_mlm_loss` -> `baseline_mlm_loss`.

    A term with an F1 detects positives, which are not in the batches. With their share p (`eval_..._share`), the
    baseline of the loss predicts p everywhere, and the baseline of F1 predicts positives everywhere. `terms` are the
    names of the loss terms of the `targets`; by default the terms in `metrics`.
    """
    if terms is None:
        terms = [name.removeprefix("eval_") for name in metrics if name.endswith("_loss") and name != "eval_loss"]
    named = {}
    for target, term in zip(targets, terms or ["loss"], strict=True):
        if f"eval_{term}" not in metrics:
            continue
        stem = term.removesuffix("loss")
        if f"eval_{stem}f1" in metrics:
            share = metrics[f"eval_{stem}share"]
            named[f"baseline_{term}"] = -sum(p * math.log(p) for p in (share, 1 - share) if p)
            named[f"baseline_{stem}f1"] = 2 * share / (1 + share)
        elif target in scores:
            named[f"baseline_{term}"] = scores[target].loss
            if f"eval_{stem}accuracy" in metrics:
                named[f"baseline_{stem}accuracy"] = scores[target].accuracy
    return named
