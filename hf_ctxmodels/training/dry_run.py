"""The size of a pretraining run, and its duration, estimated by a short training."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_ctxmodels.core.console import format_count
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.training.arguments import ASGDOptions, NTASGDOptions
from hf_ctxmodels.training.loop import TrainingLoop, TrainingResult
from hf_ctxmodels.training.pretraining import PretrainingRun

MAX_SECONDS, MIN_STEPS = 60.0, 3


@dataclass
class DryRunArguments:
    """Estimate."""

    dry_run: bool = flag(False, "Train for about a minute, and print the size and the estimated duration of the run.")
    estimate: bool = flag(
        False,
        "Print the memory of the run on each of one or more GPUs, and the smallest number of 80 GB GPUs that hold it, "
        "without data, weights or training.",
        conflicts=("dry_run",),
    )


class StepTimer(TrainerCallback):
    """Stops training once both `MIN_STEPS` timed steps and `max_seconds` have passed. The first step, which allocates
    memory, is not timed."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds, self._times = max_seconds, list[float]()

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step."""
        return (self._times[-1] - self._times[0]) / max(len(self._times) - 1, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time."""
        self._times.append(time.perf_counter())
        if len(self._times) > MIN_STEPS and self._times[-1] - self._times[0] > self._max_seconds:
            control.should_training_stop = True


def trial_run(
    loop: TrainingLoop, *callbacks: TrainerCallback, max_steps: int | None = None
) -> tuple[TrainingResult, int]:
    """Train in a temporary directory without evaluation; returns the result and the bytes of a checkpoint. The
    arguments and callbacks of the loop are changed. `max_steps` replaces the length of the run."""
    with tempfile.TemporaryDirectory() as folder:
        rate = 1e-4 if loop.arguments.learning_rate == "auto" else loop.arguments.learning_rate
        settings: dict[str, Any] = {"save_steps": 0, "save_at": [], "eval_steps": 0, "resume": False}
        if isinstance(loop.arguments.optimizer, NTASGDOptions):  # averages only after evaluations
            settings["optimizer"] = ASGDOptions(weight_decay=loop.arguments.optimizer.weight_decay)
        if max_steps is not None:
            settings |= {"max_steps": max_steps, "num_train_epochs": None}
        loop.evaluate, loop.callbacks = None, [*loop.callbacks, *callbacks]
        loop.arguments = replace(loop.arguments, output_dir=folder, learning_rate=rate, report_to="none", **settings)
        result = loop.run()
        return result, sum(file.stat().st_size for file in Path(folder).glob("checkpoint-*/*"))


def estimate_pretraining(run: PretrainingRun) -> Iterator[str]:
    """Train for about `MAX_SECONDS` in a temporary directory, and yield lines with the size and the duration of the
    run. Evaluations and checkpoints are not part of the estimate. Raises CtxError on several processes."""
    if run.loop.accelerator.num_processes > 1:
        raise CtxError(
            "A dry run measures one process.",
            location=f"--dry_run on {run.loop.accelerator.num_processes} processes",
            hint="start it without `accelerate launch`.",
        )
    loop, timer = run.loop, StepTimer(MAX_SECONDS)
    result, size = trial_run(loop, timer)
    tokens = result.tokens / result.steps * loop.total_steps
    seconds = max(timer.seconds_per_step * loop.total_steps, 1e-3)
    yield f"parameters      {result.parameters:,}"
    if loop.examples_per_epoch is not None:
        words = sum(len(text.split()) for document in run.documents or () for text in document)
        num_examples = format_count(loop.examples_per_epoch, "example")
        yield f"training text   {f'{words:,} words, ' if words else ''}{num_examples}"
    examples_per_step = format_count(result.global_batch_size, "example")
    yield f"steps           {loop.total_steps:,} of {examples_per_step}, {tokens:,.0f} tokens"
    yield f"checkpoint      {size / 1e6:,.1f} MB; --save_total_limit {loop.arguments.save_total_limit}"
    yield f"speed           {tokens / seconds:,.0f} tokens/s, measured in {format_count(result.steps, 'step')}"
    yield f"duration        {timedelta(seconds=round(seconds))} for training, without evaluations"
