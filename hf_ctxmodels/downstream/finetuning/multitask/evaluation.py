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
from hf_ctxmodels.training.checkpoint_files import list_checkpoints, temporary_path
from hf_ctxmodels.training.training_state import full_state_dict

BEST_FILE = "best.safetensors"
MEAN = "eval_mean"


class BestModel:
    """The weights with the highest mean metric so far, in a file in the output directory.

    A resumed run continues with the file: it repeats the evaluations after the checkpoint exactly, so they do not
    replace its weights.

    Args:
        output_dir: The run's output directory.
        resume: Whether the run is resumed; else a file of an earlier run is ignored.

    Attributes:
        metrics: Metrics of the best evaluation; empty before the first one.
    """

    def __init__(self, output_dir: str | Path, resume: bool) -> None:
        self.file = Path(output_dir) / BEST_FILE
        self.metrics: dict[str, float] = {}
        if resume and list_checkpoints(output_dir) and self.file.is_file():
            with safe_open(self.file, framework="pt") as saved:
                self.metrics = json.loads(saved.metadata()["metrics"])

    def update(self, metrics: Mapping[str, float], model: nn.Module, accelerator: Accelerator) -> None:
        """Save the model if its mean metric is the highest so far; a collective call."""
        if self.metrics and metrics[MEAN] <= self.metrics[MEAN]:
            return
        self.metrics = dict(metrics)
        weights = full_state_dict(accelerator.unwrap_model(model))
        if accelerator.is_main_process:
            temporary = temporary_path(self.file)
            with wrap_write_errors(self.file):
                contiguous = {name: weight.contiguous() for name, weight in weights.items()}
                safetensors.torch.save_file(contiguous, temporary, {"metrics": json.dumps(self.metrics)})
                os.replace(temporary, self.file)
        accelerator.wait_for_everyone()

    def weights(self) -> dict[str, torch.Tensor]:
        """The best weights."""
        return safetensors.torch.load_file(self.file)


class MultitaskEvaluation:
    """Evaluation for the training loop: the metrics of all tasks as `eval_<task>_<metric>`, and `eval_mean`, the mean
    of their main metrics.

    Args:
        evaluations: Task -> its evaluation, of features with the task's name (`batches.add_task_name`).
        main_metrics: Task -> the name of its main metric and its maximum, 1 or 100.
        best_model: Stores the best model; None stores none.
    """

    def __init__(
        self,
        evaluations: Mapping[str, TaskEvaluation],
        main_metrics: Mapping[str, tuple[str, float]],
        best_model: BestModel | None = None,
    ) -> None:
        self._evaluations, self._main_metrics, self._best_model = dict(evaluations), dict(main_metrics), best_model

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Predict and score; a collective call, with the same result on all processes."""
        results: dict[str, float] = {}
        for name, evaluation in self._evaluations.items():
            metrics = evaluation(model, accelerator)
            results |= {f"eval_{name}_{metric.removeprefix('eval_')}": value for metric, value in metrics.items()}
        losses = [results[f"eval_{name}_loss"] for name in self._evaluations]
        scores = [results[f"eval_{name}_{metric}"] / maximum for name, (metric, maximum) in self._main_metrics.items()]
        results = {"eval_loss": mean(losses), MEAN: mean(scores), **results}
        if self._best_model is not None:
            self._best_model.update(results, model, accelerator)
        return results
