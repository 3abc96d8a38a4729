"""The loss on held-out examples, with fixed corruption."""

import inspect
import math
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.training.batches import INDEX_KEY, Batch, Collate, IndexedCollator, count_items
from hf_ctxmodels.training.training_step import component_losses, loss_targets, metric_counts


class LossEvaluation:
    """Evaluation for the training loop: `{"eval_loss": ..., "eval_<component>_loss": ...}` over all examples.

    All evaluations use the masks of epoch 0. Each term is the mean over all its targets in the set, whatever the
    batches, and each metric the ratio of its counts over the set (see `metric_counts`).

    Args:
        examples: Map-style, indexed by `(epoch, index)`.
        collate: List of examples -> arguments of the model's forward.
        batch_size: Examples per process and batch.
    """

    def __init__(self, examples: Dataset, collate: Collate, batch_size: int) -> None:
        self._examples = examples
        self._collate = IndexedCollator(collate)
        self._batch_size = batch_size
        self._target_counts: dict[str, float] | None = None

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate; a collective call, with the same values on all processes."""
        unwrapped = accelerator.unwrap_model(model)
        has_logits_option = "return_logits" in inspect.signature(unwrapped.forward).parameters
        options = {"return_logits": False} if has_logits_option else {}
        if self._target_counts is None:
            self._target_counts = self._count_targets(accelerator, loss_targets(unwrapped))
        sums: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for batch, is_counted in self._batches(accelerator, "evaluating"):
                output = model(**batch, **options, num_items_in_batch=self._target_counts)
                for name, value in {"loss": output.loss, **component_losses(output), **metric_counts(output)}.items():
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

    def _count_targets(self, accelerator: Accelerator, targets: tuple[str, ...]) -> dict[str, float]:
        """Target -> its number in the set, at least 1."""
        batches = self._batches(accelerator, "counting targets")
        counts = [count_items([batch], targets) for batch, is_counted in batches if is_counted]
        zero = torch.zeros(len(targets) + 1, dtype=torch.int64, device=accelerator.device)
        totals = accelerator.reduce(torch.stack([zero, *counts]).sum(dim=0), reduction="sum").tolist()
        return {name: max(total, 1) for name, total in zip(targets, totals, strict=False)}

    def _batches(self, accelerator: Accelerator, description: str) -> Iterator[tuple[Batch, bool]]:
        """This process's batches, and whether each is counted: sharded models need the same number of forward passes on
        all processes, so a process without further batches repeats the last one, which is not counted."""
        size = len(self._examples)  # type: ignore[arg-type]
        starts = range(0, size, self._batch_size)
        chunks = [[(0, index) for index in range(start, min(start + self._batch_size, size))] for start in starts]
        passes = math.ceil(len(chunks) / accelerator.num_processes)
        numbers = range(accelerator.process_index, passes * accelerator.num_processes, accelerator.num_processes)
        loader = DataLoader(
            self._examples,
            batch_sampler=[chunks[min(number, len(chunks) - 1)] for number in numbers],
            collate_fn=self._collate,
            generator=torch.Generator().manual_seed(0),
        )
        bar = progress_bar(loader, description, unit="batches", enabled=accelerator.is_main_process)
        for number, batch in zip(numbers, bar, strict=True):
            del batch[INDEX_KEY]
            yield send_to_device(batch, accelerator.device), number < len(chunks)
