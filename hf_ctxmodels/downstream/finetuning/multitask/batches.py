"""Batches of one task each, and the order of the tasks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import Mixture, ReweightedMixture, ShuffledMixture
from hf_ctxmodels.downstream.tasks.base import Collator, Encoded, Feature
from hf_ctxmodels.downstream.tasks.task_list import TaskList

TASK = "task"  # the entry of a feature and of a batch that names its task


def named(task: str, encoded: Encoded) -> Encoded:
    """The features with the name of their task."""
    return Encoded([{**feature, TASK: task} for feature in encoded.features], encoded.origins)


class TaskCollator:
    """Collates features of a task as the task does, and adds its name for `CtxMultiTaskModel`.

    Args:
        collators: Task -> its collator.
    """

    def __init__(self, collators: Mapping[str, Collator]) -> None:
        self._collators = dict(collators)

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the model's forward; raises CtxError for features of several tasks."""
        (task, *others) = dict.fromkeys(feature[TASK] for feature in features)
        if others:
            raise CtxError(f"A batch is of one task, not of {', '.join([task, *others])}.")
        bare = [{name: value for name, value in feature.items() if name != TASK} for feature in features]
        return {**self._collators[task](bare), TASK: task}


def mixture_of(listed: TaskList, parts: Sequence[Sequence[Feature]], step_size: int, epochs: float | None) -> Mixture:
    """The training examples of all tasks, in the order that the list asks for.

    All micro-batches of an optimizer step are of one task, so 4 micro-batches of 4 are a batch of 16: the loss is the
    mean over the step's targets whatever its division.

    Args:
        listed: The list of tasks.
        parts: The features of each.
        step_size: Examples of a step over all micro-batches and processes.
        epochs: Length of the run, by which annealed sampling falls; None where it is given in steps.

    Raises:
        CtxError: A task has no example, or the sampling needs a length in epochs.
    """
    if listed.sampling == "proportional":
        return ShuffledMixture(parts, step_size)
    if listed.sampling == "temperature":
        return ReweightedMixture.tempered(parts, step_size, listed.temperature)
    if epochs is None:
        raise CtxError(
            "Annealed sampling needs a length in epochs.",
            location="--max_steps",
            hint="give --num_train_epochs instead, or another sampling.",
        )
    return ReweightedMixture.annealed(parts, step_size, math.ceil(epochs))


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    collected = list(values)
    return math.fsum(collected) / len(collected)
