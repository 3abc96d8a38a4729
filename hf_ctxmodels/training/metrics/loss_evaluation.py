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
    """Losses and metrics on all `examples`, `{"eval_loss": ..., "eval_<component>_loss": ...}`; the loop calls it.

    All evaluations use the masks of epoch 0. Each term is the mean over all its targets in the set, whatever the
    batches, and each metric the ratio of its counts over the set (see `metric_counts`).

    Args:
        examples: Map-style, indexed by `(epoch, index)`.
        batch_size: Examples per process and batch.
    """

    def __init__(self, examples: Dataset, collate: Collate, batch_size: int) -> None:
        self._examples = examples
        self._collate = IndexedCollator(collate)
        self._batch_size = batch_size
        self._totals: dict[str, float] | None = None

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate; a collective call, with the same values on all processes."""
        bare = accelerator.unwrap_model(model)
        targets = loss_targets(bare)
        takes = inspect.signature(bare.forward).parameters
        options = {"return_logits": False} if "return_logits" in takes else {}
        if self._totals is None:
            self._totals = self._count(accelerator, targets)
        sums: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for batch, counts in self._batches(accelerator, "evaluating"):
                output = model(**batch, **options, num_items_in_batch=self._totals)
                for name, value in {"loss": output.loss, **component_losses(output), **metric_counts(output)}.items():
                    value = value.detach().float() * counts
                    sums[name] = sums[name] + value if name in sums else value
        results = {}
        for name, value in sums.items():
            value = accelerator.reduce(value, reduction="sum")
            if value.ndim == 0:
                results[f"eval_{name}"] = value.item()
            elif value[1]:
                results[f"eval_{name}"] = (value[0] / value[1]).item()
        return results

    def _count(self, accelerator: Accelerator, targets: tuple[str, ...]) -> dict[str, float]:
        batches = self._batches(accelerator, "counting targets")
        counted = [count_items([batch], targets) for batch, counts in batches if counts]
        nothing = torch.zeros(len(targets) + 1, dtype=torch.int64, device=accelerator.device)
        total = accelerator.reduce(torch.stack([nothing, *counted]).sum(dim=0), reduction="sum").tolist()
        return {name: max(count, 1) for name, count in zip(targets, total, strict=False)}

    def _batches(self, accelerator: Accelerator, what: str) -> Iterator[tuple[Batch, bool]]:
        """This process's batches, and whether each counts: sharded models need the same number of forward passes on all
        processes, so a process without more batches repeats the last one, which does not count."""
        size = len(self._examples)  # type: ignore[arg-type]
        starts = range(0, size, self._batch_size)
        chunks = [[(0, index) for index in range(start, min(start + self._batch_size, size))] for start in starts]
        rounds = math.ceil(len(chunks) / accelerator.num_processes)
        numbers = [each * accelerator.num_processes + accelerator.process_index for each in range(rounds)]
        mine = [chunks[min(number, len(chunks) - 1)] for number in numbers]
        loader = DataLoader(
            self._examples, batch_sampler=mine, collate_fn=self._collate, generator=torch.Generator().manual_seed(0)
        )
        shown = accelerator.is_main_process
        for chunk, batch in zip(numbers, progress_bar(loader, what, unit="batches", enabled=shown), strict=True):
            del batch[INDEX_KEY]
            yield send_to_device(batch, accelerator.device), chunk < len(chunks)
