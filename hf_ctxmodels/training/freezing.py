"""Frozen encoders, and gradual unfreezing of layers from the top down."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.training.arguments import LoopArguments, steps_of
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.optimizers import layer_groups, require_layers


def freeze_encoder(model: CtxPreTrainedModel) -> None:
    """Freeze the encoder; its pooler, if it has one, is trained with the heads (Peters et al. 2018, section 3.3; Devlin
    et al. 2019, section 5.3).

    This disables the encoder's dropout (`model.is_encoder_frozen`). Tied weights are frozen with the embeddings; raises
    CtxError if the model has no other weights outside the encoder.

    Example:
        >>> model = AutoModelForTokenClassification.from_pretrained("runs/bert", num_labels=9)  # doctest: +SKIP
        >>> freeze_encoder(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data).train()  # doctest: +SKIP
    """
    encoder = model.base_model
    frozen = [parameter for name, parameter in encoder.named_parameters() if not name.startswith("pooler.")]
    frozen_ids = {id(parameter) for parameter in frozen}
    if encoder is model or not frozen or all(id(parameter) in frozen_ids for parameter in model.parameters()):
        raise CtxError(
            f"{type(model).__name__} has no trainable weights outside its encoder.",
            hint="freeze the encoder of a model with a head.",
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.is_encoder_frozen = True
    model.train(model.training)


def freeze_language_layers(model: PreTrainedModel) -> None:
    """Freeze the layers that each language has separately, so that a task which is learned in one language fits the
    layers of the others (Wu et al. 2020, arXiv 1911.01464, section 4.3); raises CtxError if there are none."""
    layers = getattr(model.base_model, "language_layers", None)
    if not layers:
        raise CtxError(
            f"{type(model).__name__} has no separate layers of each language.",
            location="--freeze language-layers",
            hint="remove it, or use an XLM that was pretrained with --config_options num_language_layers=N.",
        )
    for layer in layers:
        layer.requires_grad_(False)


def check_layerwise_flags(loop: LoopArguments) -> None:
    """Raise CtxError for learning rates by layer in a frozen encoder."""
    if loop.layerwise_lr_decay != 1:
        raise CtxError(
            "The layers of a frozen encoder have no learning rates.",
            location=f"--freeze encoder --layerwise_lr_decay {loop.layerwise_lr_decay:g}",
            hint="pass --layerwise_lr_decay 1, also if a recipe has another value.",
        )


class LayerUnfreezing(FinetuningCallback):
    """Base class of callbacks that train some `layer_groups` of an unwrapped model at a time, by `requires_grad`;
    raises CtxError if the encoder's stack of layers is unknown.

    With several processes, `DistributedDataParallel` must wrap the model while all groups are trainable, and with
    `find_unused_parameters`, which skips the frozen groups in the reduction of gradients. `finetune` does so, and
    Trainer by default, except with activation checkpointing (`ddp_find_unused_parameters=True`).
    """

    requires_full_weights = True

    def __init__(self, model: PreTrainedModel) -> None:
        require_layers(model)
        self._model = model
        self._layer_groups = layer_groups(model)

    def train_groups(self, depths: Sequence[int]) -> None:
        """Make the groups with these indices, counted from the embeddings, trainable, and freeze the others."""
        for depth, group in enumerate(self._layer_groups):
            for parameter in group:
                parameter.requires_grad_(depth in depths)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unfreeze all groups."""
        self.train_groups(range(len(self._layer_groups)))


class GradualUnfreezing(LayerUnfreezing):
    """Trains the last group of layers first, and one more after each interval (Howard & Ruder 2018, arXiv 1801.06146,
    section 3.3).

    Args:
        interval: Optimizer steps between two groups; a fraction of the run if below 1; 0 trains all from the start;
            None divides the run evenly.

    Raises:
        CtxError: The interval is negative, or the encoder's stack of layers is unknown.

    Example:
        >>> callbacks = [GradualUnfreezing(model, 100)]  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, interval: float | None = None) -> None:
        if interval is not None and interval < 0:
            raise CtxError(
                f"interval={interval} is negative.", hint="use 0 or more optimizer steps, or a fraction of the run."
            )
        super().__init__(model)
        self._interval = interval
        self._steps_per_group: float = interval or 0

    def num_trained_groups(self, step: int) -> int:
        """Number of groups, counted from the last, that are trained after `step` steps."""
        num_groups = len(self._layer_groups)
        return min(num_groups, 1 + int(step // self._steps_per_group)) if self._steps_per_group else num_groups

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Determine the interval in steps; raises CtxError for sharded weights."""
        super().on_train_begin(args, state, control, **kwargs)
        if self._interval is None:
            self._steps_per_group = max(1, state.max_steps // len(self._layer_groups))
        elif self._interval:
            self._steps_per_group = max(1, steps_of(self._interval, state.max_steps))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze and unfreeze groups."""
        number = self.num_trained_groups(state.global_step)
        self.train_groups(range(len(self._layer_groups) - number, len(self._layer_groups)))
