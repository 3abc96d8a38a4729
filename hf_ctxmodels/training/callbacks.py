"""What a way to fine-tune does during training, and how the loop and transformers' Trainer call it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from hf_ctxmodels.core.errors import CtxError


@dataclass(frozen=True)
class TrainingRun:
    """What a method is told of a run.

    Attributes:
        model: The model, not wrapped.
        optimizer: The optimizer, not wrapped.
        total_steps: Optimizer steps of the run.
        steps_per_epoch: Steps of a pass over the data; None for a stream.
        evaluates: Whether there is validation data.
        processes: Number of processes.
        sharded: Whether the weights are divided among them.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    total_steps: int
    steps_per_epoch: float | None = None
    evaluates: bool = False
    processes: int = 1
    sharded: bool = False


class FinetuningCallback:
    """A way to fine-tune. All methods of this class do nothing; a subclass overrides those that it needs.

    Attributes:
        requires_full_weights: Whether the method needs all weights in every process.
        requires_single_process: Whether the method changes which parameters have gradients, which several processes do not support.
    """

    requires_full_weights = False
    requires_single_process = False

    def start(self, run: TrainingRun) -> None:
        """Prepare; the optimizer exists, the schedule does not. Raises CtxError for a run that it cannot serve."""

    def before_step(self, step: int) -> None:
        """Called before the forward pass of an optimizer step; `step` of them are done."""

    def before_update(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Change the gradients of a whole step: once, after all micro-batches and the mean over processes, before
        clipping.

        Args:
            scale: What the gradients are multiplied by, for half precision.

        Returns:
            Terms for the log, 0-dimensional; a term `..._loss` is part of the loss.
        """
        return {}

    def evaluates_after(self, step: int) -> bool:
        """Whether there must be an evaluation after so many steps."""
        return False

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take an evaluation after `step` steps; gives whether the weights were changed."""
        return False

    def finish(self) -> None:
        """Undo what was made for training alone."""

    def save(self, directory: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""

    def load(self, directory: Path) -> None:
        """Restore `save`."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when a run is resumed."""
        return {}


class Methods(FinetuningCallback):
    """Several methods as one, in their order."""

    def __init__(self, methods: Iterable[FinetuningCallback]) -> None:
        self._methods = list(methods)

    @property
    def keeps_state(self) -> bool:
        """Whether a resumed run needs what a method saves."""
        return any(type(method).load is not FinetuningCallback.load for method in self._methods)

    def start(self, run: TrainingRun) -> None:
        """Start all, once it is certain that the run's processes suit them."""
        for method in self._methods:
            if method.requires_single_process:
                require_one_process(run.processes)
            if method.requires_full_weights and run.sharded:
                raise CtxError(
                    f"{type(method).__name__} needs all weights in every process.",
                    location="accelerate launch",
                    hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
                )
            method.start(run)

    def before_step(self, step: int) -> None:
        """See `FinetuningCallback`."""
        for method in self._methods:
            method.before_step(step)

    def before_update(self, scale: float = 1.0) -> dict[str, Tensor]:
        """See `FinetuningCallback`."""
        return {name: value for method in self._methods for name, value in method.before_update(scale).items()}

    def evaluates_after(self, step: int) -> bool:
        """See `FinetuningCallback`."""
        return any(method.evaluates_after(step) for method in self._methods)

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """See `FinetuningCallback`."""
        changed = [method.after_evaluation(step, metrics) for method in self._methods]
        return any(changed)

    def finish(self) -> None:
        """See `FinetuningCallback`."""
        for method in self._methods:
            method.finish()

    def save(self, directory: Path) -> None:
        """See `FinetuningCallback`."""
        for method in self._methods:
            method.save(directory)

    def load(self, directory: Path) -> None:
        """See `FinetuningCallback`."""
        for method in self._methods:
            method.load(directory)

    @property
    def identity(self) -> dict[str, Any]:
        """See `FinetuningCallback`."""
        return {name: value for method in self._methods for name, value in method.identity.items()}


def require_one_process(number: int) -> None:
    """Raise CtxError for several processes, which would wait for gradients of frozen parameters."""
    if number > 1:
        raise CtxError(
            "Gradual unfreezing and its relatives change which parameters have gradients, which several processes do "
            "not support.",
            location=f"{number} processes",
            hint="use one process, or leave out --unfreeze_steps and --thaw.",
        )


class MethodCallback(TrainerCallback):
    """Methods for `transformers.Trainer`.

    Trainer calls it after clipping, so a penalty's gradient is not clipped there. It keeps nothing in Trainer's
    checkpoints: a method that needs something from there refuses to resume.

    Args:
        methods: Ways to fine-tune, in the order in which they act.

    Example:
        >>> keep = L2SPPenalty(model, 0.01)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data, callbacks=[MethodCallback(keep)]).train()  # doctest: +SKIP
    """

    def __init__(self, *methods: FinetuningCallback) -> None:
        self._methods = Methods(methods)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Start the methods; raises CtxError where they cannot serve the run."""
        if state.global_step and self._methods.keeps_state:
            raise CtxError(
                "Trainer's checkpoint has not the state of the way to fine-tune.",
                hint="train from the start, or resume with `hf-ctxmodels finetune`.",
            )
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner
        run = TrainingRun(
            model,
            optimizer,
            state.max_steps,
            state.max_steps / state.num_train_epochs,
            True,  # else Trainer says that there is no eval_dataset, when one is needed
            args.world_size,
            bool(args.fsdp) or args.deepspeed is not None,
        )
        self._methods.start(run)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the forward pass."""
        self._methods.before_step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the gradients."""
        self._methods.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for an evaluation where a method needs one."""
        if self._methods.evaluates_after(state.global_step):
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Take the evaluation."""
        if state.global_step:
            self._methods.after_evaluation(state.global_step, metrics or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo what was made for training alone."""
        self._methods.finish()
