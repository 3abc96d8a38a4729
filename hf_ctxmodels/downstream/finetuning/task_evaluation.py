"""Evaluation in fine-tuning: the loss, the predictions and the task's metrics on held-out examples, in one pass."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import nn

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.downstream.tasks import Encoded, Task
from hf_ctxmodels.downstream.tasks.base import Collator, Logits
from hf_ctxmodels.training.batches import count_items


class TaskEvaluation:
    """Evaluation for the training loop: `{"eval_loss": ..., "eval_<metric>": ...}` over all examples.

    The loss is the mean over all targets. The result does not depend on batches and the number of processes.

    Args:
        task: The task after `configure`.
        examples, encoded: The examples and their encoding.
        collate: The task's collator.
        batch_size: Features per process and batch.

    Attributes:
        predictions: One per example, from the latest call.
    """

    def __init__(
        self, task: Task[Any], examples: Sequence[Any], encoded: Encoded, collate: Collator, batch_size: int
    ) -> None:
        self._task, self._examples, self._encoded = task, examples, encoded
        self._collate, self._batch_size = collate, batch_size
        self.predictions: list[Any] = []

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Predict and score; must be called by every process, with the same result for all."""
        outputs, loss = self._run(model, accelerator)
        self.predictions = self._task.decode(self._examples, self._encoded, outputs)
        scores = self._task.score(self._examples, self.predictions)
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in scores.items()}

    @torch.no_grad()
    def _run(self, model: nn.Module, accelerator: Accelerator) -> tuple[list[Logits], float]:
        """The outputs for every feature, in order, and the mean loss, on every process."""
        bare = accelerator.unwrap_model(model)
        features, targets = self._encoded.features, self._task.targets
        starts = range(0, len(features), self._batch_size)
        rounds = math.ceil(len(starts) / accelerator.num_processes)
        mine: dict[int, list[Logits]] = {}
        total = torch.zeros(2, dtype=torch.float64)
        numbers = range(accelerator.process_index, rounds * accelerator.num_processes, accelerator.num_processes)
        for number in progress_bar(numbers, "evaluating", unit="batches", enabled=accelerator.is_main_process):
            # Sharded models need the same number of passes on every process, so some repeat the last batch.
            start = starts[min(number, len(starts) - 1)]
            batch = self._collate(features[start : start + self._batch_size])
            inputs = send_to_device(batch, accelerator.device)
            output = model(**inputs)
            if number < len(starts):
                mine[start] = (
                    self._task.generate(bare, inputs)
                    if self._task.is_generative
                    else feature_outputs(self._task, output, batch)
                )
                count = float(count_items([batch], targets)[0])
                total += torch.tensor([output.loss.item() * count, count], dtype=torch.float64)
        gathered = gather_object([(mine, total.tolist())])
        rows = {start: batch_rows for part, _ in gathered for start, batch_rows in part.items()}
        loss_sum, count = (math.fsum(column) for column in zip(*(sums for _, sums in gathered)))
        return [row for start in starts for row in rows[start]], loss_sum / count


def feature_outputs(task: Task[Any], output: Any, batch: dict[str, torch.Tensor]) -> list[Logits]:
    """The outputs for each feature of a batch, without padding."""
    columns = {name: getattr(output, name).float().cpu() for name in task.output_names}
    if not task.has_token_outputs:
        return [{name: column[i].numpy() for name, column in columns.items()} for i in range(len(batch["input_ids"]))]
    return [
        {name: column[i][kept].numpy() for name, column in columns.items()}
        for i, kept in enumerate(batch["attention_mask"].bool())
    ]
