"""Base class of the fine-tuning callbacks, for the training loop and for `transformers.Trainer`."""

from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.checkpoint_files import checkpoint_path


class FinetuningCallback(TrainerCallback):
    """A `TrainerCallback` that changes how a model is fine-tuned: its gradients, or which weights are trained.

    The training loop and `transformers.Trainer` call the same events. The loop passes more:

    - `on_train_begin` gets `has_evaluation` (whether there is validation data) and `checkpoint` (the directory to
      resume from, or None), and is called before the learning-rate schedule is made;
    - `on_pre_optimizer_step` gets `gradient_scale` (the factor of float16 loss scaling) and `logs` (a dictionary for
      0-dimensional tensors; entries named `..._loss` are added to the logged loss), and is called before clipping,
      unlike in Trainer;
    - `on_save` gets `checkpoint`, the directory that is being written.

    `args` are the loop's `LoopArguments`, or `TrainingArguments`. A callback that changes the weights in `on_evaluate`
    sets `control.should_evaluate`: the loop then repeats the last evaluation of the run.

    Attributes:
        requires_full_weights: Whether every process must hold all weights (no sharding).

    Example:
        >>> penalty = L2SPPenalty(model, 0.01)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data, callbacks=[penalty]).train()  # doctest: +SKIP
    """

    requires_full_weights = False

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when a run is resumed."""
        return {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise CtxError if the callback does not support the run's processes; subclasses call it first."""
        launch = AcceleratorState()
        if self.requires_full_weights and launch.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise CtxError(
                f"{type(self).__name__} needs all weights in every process, but they are sharded.",
                location="accelerate launch",
                hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
            )


def checkpoint_directory(args: Any, state: Any, checkpoint: Path | None) -> Path:
    """The checkpoint of the current step: the one that the training loop passes, or Trainer's."""
    return checkpoint_path(args.output_dir, state.global_step) if checkpoint is None else checkpoint
