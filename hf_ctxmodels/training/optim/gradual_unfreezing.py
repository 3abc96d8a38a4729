"""Gradual unfreezing (Howard & Ruder 2018, section 3.3): layers are trained from the top down."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.callbacks import FinetuningCallback, MethodCallback, TrainingRun
from hf_ctxmodels.training.optim.layer_groups import layer_groups, require_layers

_BEST_WEIGHTS = "best_of_stage.safetensors"
_BEST_SCORE = "best_of_stage.json"


class LayerUnfreezing(FinetuningCallback):
    """The base: trains some groups of layers at a time, by `requires_grad`.

    Args:
        model: The model, not wrapped; its `layer_groups` are those of its trainable parameters now.

    Raises:
        CtxError: The layers of its encoder are not known.
    """

    requires_single_process = True

    def __init__(self, model: PreTrainedModel) -> None:
        require_layers(model)
        self._model = model
        self._groups = layer_groups(model)

    def train_groups(self, depths: Sequence[int]) -> None:
        """Let the groups of these numbers, counted from the embeddings, be trained, and no others."""
        for depth, group in enumerate(self._groups):
            for parameter in group:
                parameter.requires_grad_(depth in depths)

    def finish(self) -> None:
        """Unfreeze all."""
        self.train_groups(range(len(self._groups)))


class GradualUnfreezing(LayerUnfreezing):
    """Trains the last group of layers first, and one more after each interval (Howard & Ruder 2018, section 3.3).

    Args:
        model: As for `LayerUnfreezing`.
        interval: Optimizer steps between two groups; 0 trains all from the start; None divides the run evenly.

    Raises:
        CtxError: The interval is negative.
    """

    def __init__(self, model: PreTrainedModel, interval: int | None = None) -> None:
        if interval is not None and interval < 0:
            raise CtxError(f"interval={interval} is negative.", hint="give the optimizer steps between two groups.")
        super().__init__(model)
        self._interval = interval

    def start(self, run: TrainingRun) -> None:
        """Determine the interval."""
        if self._interval is None:
            self._interval = max(1, run.total_steps // len(self._groups))

    def trained(self, step: int) -> int:
        """Number of groups, counted from the last, that are trained after `step` steps."""
        return len(self._groups) if not self._interval else min(len(self._groups), 1 + step // self._interval)

    def before_step(self, step: int) -> None:
        """Freeze and unfreeze."""
        self.train_groups(range(len(self._groups) - self.trained(step), len(self._groups)))


class GradualUnfreezingCallback(MethodCallback):
    """`GradualUnfreezing` for `transformers.Trainer`, in one process.

    Args:
        interval: Optimizer steps between two groups; None divides the run evenly.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GradualUnfreezingCallback(100)])
    """

    def __init__(self, interval: int | None = None) -> None:
        super().__init__()
        self._interval = interval

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Determine the groups; raises CtxError for several processes."""
        super().__init__(GradualUnfreezing(model, self._interval))
        super().on_train_begin(args, state, control, model, optimizer, **kwargs)
