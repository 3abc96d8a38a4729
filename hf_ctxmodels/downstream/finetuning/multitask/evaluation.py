"""Evaluation of all tasks, and the best model by the mean of their main metrics."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import nn

from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.downstream.finetuning.multitask.batches import mean
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.training.checkpoint.directory import list_checkpoints, temporary_path
from hf_ctxmodels.training.checkpoint.training_state import full_state_dict

BEST_FILE = "best.safetensors"
MEAN = "eval_mean"


class BestModel:
    """The weights of the evaluation with the highest mean so far, in one file beside the checkpoints.

    A run that is resumed goes on with the file: its evaluations repeat those after the checkpoint to the bit, so that
    they offer what the file has already.

    Args:
        output_dir: Of the run.
        resume: Whether the run goes on from a checkpoint there; else a file of an older run is no part of it.

    Attributes:
        metrics: Of that evaluation; empty before the first one.
    """

    def __init__(self, output_dir: str | Path, resume: bool) -> None:
        self.file = Path(output_dir) / BEST_FILE
        self.metrics: dict[str, float] = {}
        if resume and list_checkpoints(output_dir) and self.file.is_file():
            with safe_open(self.file, framework="pt") as saved:
                self.metrics = json.loads(saved.metadata()["metrics"])

    def offer(self, metrics: Mapping[str, float], model: nn.Module, accelerator: Accelerator) -> None:
        """Save the model if its mean is higher than that of all before; a collective call."""
        if self.metrics and metrics[MEAN] <= self.metrics[MEAN]:
            return
        self.metrics = dict(metrics)
        weights = full_state_dict(accelerator.unwrap_model(model))
        if accelerator.is_main_process:
            temporary = temporary_path(self.file)
            with wrap_write_errors(self.file):
                whole = {name: value.contiguous() for name, value in weights.items()}
                safetensors.torch.save_file(whole, temporary, {"metrics": json.dumps(self.metrics)})
                os.replace(temporary, self.file)
        accelerator.wait_for_everyone()

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights."""
        return safetensors.torch.load_file(self.file)


class TasksEvaluation:
    """Evaluation for the training loop: every task's metrics as `eval_<task>_<metric>`, and `eval_mean`, the mean of
    their main metrics.

    Args:
        evaluations: Task -> its evaluation, whose features are `batches.named`.
        main: Task -> the name of its main metric and its largest value, 1 or 100.
        best: Keeps the best model; None keeps none.
    """

    def __init__(
        self,
        evaluations: Mapping[str, TaskEvaluation],
        main: Mapping[str, tuple[str, float]],
        best: BestModel | None = None,
    ) -> None:
        self._evaluations, self._main, self._best = dict(evaluations), dict(main), best

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Predict and score; must be called by every process, with the same result for all."""
        results: dict[str, float] = {}
        for name, evaluation in self._evaluations.items():
            scores = evaluation(model, accelerator)
            results |= {f"eval_{name}_{metric.removeprefix('eval_')}": value for metric, value in scores.items()}
        losses = [results[f"eval_{name}_loss"] for name in self._evaluations]
        main = [results[f"eval_{name}_{metric}"] / most for name, (metric, most) in self._main.items()]
        results = {"eval_loss": mean(losses), MEAN: mean(main), **results}
        if self._best is not None:
            self._best.offer(results, model, accelerator)
        return results
