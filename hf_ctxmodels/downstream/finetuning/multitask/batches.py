"""Batches of one task each, and the order of tasks in training."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import Mixture, ReweightedMixture, ShuffledMixture
from hf_ctxmodels.downstream.tasks.base import Collator, Encoded, Feature
from hf_ctxmodels.downstream.tasks.task_list import TaskList

TASK = "task"  # key of the task's name in features and batches


def add_task_name(task: str, encoded: Encoded) -> Encoded:
    """Add the name of the task to its features."""
    return Encoded([{**feature, TASK: task} for feature in encoded.features], encoded.origins)


class TaskCollator:
    """Collates the features of one task with its collator, and adds the task's name for `CtxMultiTaskModel`.

    Args:
        collators: Task -> its collator.
    """

    def __init__(self, collators: Mapping[str, Collator]) -> None:
        self._collators = dict(collators)

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the model's forward; raises CtxError for features of several tasks."""
        tasks = list(dict.fromkeys(feature[TASK] for feature in features))
        if len(tasks) > 1:
            raise CtxError(f"Expected a batch of one task, but it has features of {', '.join(tasks)}.")
        inputs = [{name: value for name, value in feature.items() if name != TASK} for feature in features]
        return {**self._collators[tasks[0]](inputs), TASK: tasks[0]}


def make_mixture(
    task_list: TaskList, features_by_task: Sequence[Sequence[Feature]], step_size: int, epochs: float | None
) -> Mixture:
    """The training examples of all tasks, in the order of the list's sampling.

    All micro-batches of an optimizer step are of one task, so 4 micro-batches of 4 equal a batch of 16: the loss is the
    mean over the step's targets.

    Args:
        task_list: The list of tasks.
        features_by_task: The features of each task.
        step_size: Examples per step, over all micro-batches and processes.
        epochs: Length of the run, for annealed sampling; None if it is given in steps.

    Raises:
        CtxError: A task has no example, or the sampling needs a length in epochs.
    """
    if task_list.sampling == "proportional":
        return ShuffledMixture(features_by_task, step_size)
    if task_list.sampling == "temperature":
        return ReweightedMixture.tempered(features_by_task, step_size, task_list.temperature)
    if epochs is None:
        raise CtxError(
            "Annealed sampling needs the length of the run in epochs.",
            location="--max_steps",
            hint="pass --num_train_epochs instead, or another sampling.",
        )
    return ReweightedMixture.annealed(features_by_task, step_size, math.ceil(epochs))


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
