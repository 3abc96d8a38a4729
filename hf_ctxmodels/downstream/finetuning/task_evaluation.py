"""Evaluation in fine-tuning: the loss, the predictions and the metrics of one or several tasks on held-out examples."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import safetensors
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import nn

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.output_files import replacing, write_tensors
from hf_ctxmodels.downstream.tasks import Encoded, Task
from hf_ctxmodels.downstream.tasks.base import Collator, Logits
from hf_ctxmodels.training.accelerator import unwrap_model
from hf_ctxmodels.training.checkpoint_files import list_checkpoints
from hf_ctxmodels.training.evaluation import batches_of_process
from hf_ctxmodels.training.training_state import full_state_dict
from hf_ctxmodels.training.training_step import count_targets

MEAN = "eval_mean"
"""The mean of the main metrics of several tasks, among the results of an evaluation."""


@dataclass
class TaskEvaluation:
    """Evaluation for the training loop: `{"eval_loss": ..., "eval_<metric>": ...}` over all examples, independent of
    batches and the number of processes. The loss is the mean over all targets; the loss of a batch without targets,
    such as of a text without coreference, is added to their sum.

    Attributes:
        task, examples, encoded: The task after `configure`, the examples and their encoding.
        collate: The task's collator.
        batch_size: Features per process and batch.
        predictions: One prediction per example, from the latest call.
    """

    task: Task[Any]
    examples: Sequence[Any]
    encoded: Encoded
    collate: Collator
    batch_size: int
    predictions: list[Any] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Predict and score; a collective call, with the same result on all processes."""
        unwrapped = unwrap_model(accelerator, model)
        features, targets = self.encoded.features, self.task.targets
        starts = range(0, len(features), self.batch_size)
        outputs_by_start: dict[int, list[Logits]] = {}
        loss_and_count = torch.zeros(2, dtype=torch.float64)
        numbers = batches_of_process(len(starts), accelerator)
        bar = progress_bar(numbers, "evaluating", unit="batches", enabled=accelerator.is_main_process)
        for number, is_counted in bar:
            start = starts[number]
            batch = self.collate(features[start : start + self.batch_size])
            inputs = send_to_device(batch, accelerator.device, non_blocking=True)
            output = model(**inputs, **self.task.evaluation_arguments)
            if is_counted:
                outputs_by_start[start] = (
                    self.generate(unwrapped, inputs, start)
                    if self.task.is_generative
                    else feature_outputs(self.task, output, batch)
                )
                count = float(count_targets([batch], targets)[0])
                # a head divides the summed loss of a batch without targets by 1; in transformers it is nan
                loss_sum = output.loss.item() * max(count, 1)
                loss_sum = 0.0 if not count and math.isnan(loss_sum) else loss_sum
                loss_and_count += torch.tensor([loss_sum, count], dtype=torch.float64)
        gathered = gather_object([(outputs_by_start, loss_and_count.tolist())])
        all_outputs = {start: batch for outputs, _ in gathered for start, batch in outputs.items()}
        loss_sum, count = (math.fsum(values) for values in zip(*(sums for _, sums in gathered)))
        outputs = [output for start in starts for output in all_outputs[start]]
        self.predictions = self.task.decode(self.examples, self.encoded, outputs)
        scores = self.task.score(self.examples, self.predictions)
        return {"eval_loss": loss_sum / max(count, 1)} | {f"eval_{name}": value for name, value in scores.items()}

    def generate(self, model: Any, inputs: dict[str, Any], start: int) -> list[Logits]:
        """The output for each feature of the batch that begins with feature `start`."""
        return self.task.generate(model, inputs)

    def warnings(self, scores: Mapping[str, float], learned_baseline: Mapping[str, float]) -> list[str]:
        """A sentence if the latest predictions do not depend on the input, and one if the main metric is lower than the
        score of the task's learned baseline."""
        sentences = []
        constant = self.task.constant_prediction(self.examples, self.predictions) if self.predictions else None
        if constant is not None:
            text = f"{constant:.4g}" if isinstance(constant, float) else repr(constant)
            sentences.append(f"the prediction is {text} for (nearly) all of {len(self.predictions)} inputs")
        if learned_baseline:
            name, value = next(iter(learned_baseline.items()))
            if scores[name] < value:
                sentences.append(f"{name} {scores[name]:.4f} is below {value:.4f}, the result of TF-IDF")
        return sentences


class BestModel:
    """The weights with the highest metric so far, in a file in the output directory; `metrics` are empty before the
    first evaluation. A resumed run continues with the file, which a new run ignores.

    Attributes:
        file: The weights, with the metrics of the evaluation as metadata.
        metric: Name of the metric, by default the mean of the main metrics of several tasks.
    """

    def __init__(self, output_dir: str | Path, resume: bool, metric: str = MEAN) -> None:
        self.file, self.metric = Path(output_dir) / "best.safetensors", metric
        self.metrics: dict[str, float] = {}
        if resume and list_checkpoints(output_dir):
            self.metrics = self.saved_metrics()

    def update(self, metrics: Mapping[str, float], model: nn.Module, accelerator: Accelerator) -> None:
        """Save the model if its metric is the highest so far; a collective call."""
        if self.metrics and _comparable(metrics[self.metric]) <= _comparable(self.metrics[self.metric]):
            return
        self.metrics = dict(metrics)
        unwrapped = unwrap_model(accelerator, model)
        weights = full_state_dict(unwrapped)
        if accelerator.is_main_process:
            self.save(unwrapped, weights)
        accelerator.wait_for_everyone()

    def save(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        """Write the weights and the metrics, atomically."""
        with replacing(self.file) as temporary:
            write_tensors(temporary, weights, {"metrics": json.dumps(self.metrics)})

    def saved_metrics(self) -> dict[str, float]:
        """The metrics of the saved model; empty if there is none."""
        if not self.file.is_file():
            return {}
        with safetensors.safe_open(self.file, framework="pt") as saved:
            return json.loads(saved.metadata()["metrics"])


def _comparable(value: float) -> float:
    """A metric, or minus infinity if it is not defined, as a correlation of constants."""
    return -math.inf if math.isnan(value) else value


@dataclass
class SeveralTasksEvaluation:
    """Evaluation for the training loop: the metrics of all tasks as `eval_<task>_<metric>`, and `eval_mean`, the mean
    of their main metrics (0 for a metric that is not defined).

    Attributes:
        evaluations: Task -> its evaluation.
        main_metrics: Task -> the name of its main metric and its maximum, 1 or 100.
        best_models: Save the models with the best metrics.
    """

    evaluations: Mapping[str, TaskEvaluation]
    main_metrics: Mapping[str, tuple[str, float]]
    best_models: Sequence[BestModel] = ()

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Predict and score; a collective call, with the same result on all processes."""
        results: dict[str, float] = {}
        for name, evaluation in self.evaluations.items():
            metrics = evaluation(model, accelerator)
            results |= {f"eval_{name}_{metric.removeprefix('eval_')}": value for metric, value in metrics.items()}
        losses = [results[f"eval_{name}_loss"] for name in self.evaluations]
        results = {"eval_loss": fmean(losses), MEAN: mean_score(results, self.main_metrics, "eval"), **results}
        for best in self.best_models:
            best.update(results, model, accelerator)
        return results


def mean_score(metrics: Mapping[str, float], main_metrics: Mapping[str, tuple[str, float]], prefix: str) -> float:
    """The mean of the metrics `<prefix>_<task>_<metric>`, each divided by its maximum; an undefined one (nan) is 0."""
    scores = [metrics[f"{prefix}_{task}_{name}"] / maximum for task, (name, maximum) in main_metrics.items()]
    return fmean(0.0 if math.isnan(score) else score for score in scores)


def learned_baseline_scores(task: Task[Any], training: Sequence[Any], validation: Sequence[Any]) -> dict[str, float]:
    """The metrics of `Task.learned_baseline`; empty without one."""
    predictions = task.learned_baseline(training, validation)
    return {} if predictions is None else task.score(validation, predictions)


def feature_outputs(task: Task[Any], output: Any, batch: dict[str, torch.Tensor]) -> list[Logits]:
    """The outputs for each feature of a batch, without padding."""
    tensors = {name: getattr(output, name).float().cpu() for name in task.output_names}
    for name in task.position_outputs:
        tensors[name] = tensors[name].long() - batch["attention_mask"].cpu().argmax(1, keepdim=True)
    if not task.has_token_outputs:
        return [{name: tensor[i].numpy() for name, tensor in tensors.items()} for i in range(len(batch["input_ids"]))]
    return [
        {name: tensor[i][is_token].numpy() for name, tensor in tensors.items()}
        for i, is_token in enumerate(batch["attention_mask"].bool())
    ]
