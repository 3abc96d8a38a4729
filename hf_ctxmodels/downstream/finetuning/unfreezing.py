"""Unfreezing schedules in stages: chain-thaw, and unfreezing in three stages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import write_tensors
from hf_ctxmodels.training.callbacks import checkpoint_directory
from hf_ctxmodels.training.freezing import LayerUnfreezing
from hf_ctxmodels.training.optimizers import has_heads, unwrap_optimizer

_BEST_WEIGHTS = "best_of_stage.safetensors"
_BEST_SCORE = "best_of_stage.json"


class ChainThaw(LayerUnfreezing):
    """Chain-thaw (Felbo et al. 2017, arXiv 1708.00524, section 3.3): trains the heads alone, then each group of layers
    alone from the embeddings up, then all together.

    Each stage has an equal share of the run. It begins with a new optimizer state and ends with an evaluation and the
    weights of its best evaluation. In the released code a stage lasts until five evaluations in a row are no better.

    Args:
        model: The model, not wrapped.
        first_rate, rate: Learning rate of the first stage and of the others, constant within a stage; the ratios
            between the rates of parameter groups are kept.
        metric: The metric of an evaluation by which the best weights are chosen; lower is better.

    Raises:
        CtxError: The model has no heads, or its stack of layers is unknown.
    """

    def __init__(
        self, model: PreTrainedModel, first_rate: float = 1e-3, rate: float = 1e-4, metric: str = "eval_loss"
    ) -> None:
        super().__init__(model)
        if not has_heads(model) or len(self._layer_groups) < 2:
            raise CtxError(
                f"{type(model).__name__} has no heads above trainable layers.", hint="use another --freeze method."
            )
        last = len(self._layer_groups) - 1
        self.stages = [[last], *([depth] for depth in range(last)), list(range(last + 1))]
        self._first_rate, self._rate, self._metric = first_rate, rate, metric
        self._best_weights: dict[str, torch.Tensor] = {}
        self._best_score = float("inf")

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        has_evaluation: bool = True,
        checkpoint: Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Divide the run into stages, and restore the best weights of a resumed stage; raises CtxError without
        validation data, with too few steps or an averaging optimizer, or if the checkpoint lacks the weights."""
        super().on_train_begin(args, state, control, **kwargs)
        if not has_evaluation:
            raise CtxError("Chain-thaw chooses weights by evaluations.", hint="use validation data.")
        if state.max_steps < len(self.stages):
            raise CtxError(
                f"Chain-thaw has {len(self.stages)} stages, but the run has {state.max_steps} steps.",
                hint=f"train for {len(self.stages)} steps or more.",
            )
        self._optimizer, self._total_steps = unwrap_optimizer(optimizer), state.max_steps
        if isinstance(self._optimizer, torch.optim.Adagrad | torch.optim.ASGD):
            name = type(self._optimizer).__name__
            raise CtxError(f"{name} averages over the run; chain-thaw resets it.", hint="use --optimizer adamw.")
        groups = self._optimizer.param_groups
        self._lr_ratios = [group["lr"] / groups[0]["lr"] for group in groups]
        if state.global_step:
            directory = checkpoint_directory(args, state, checkpoint)
            if not (directory / _BEST_WEIGHTS).is_file():
                raise CtxError(
                    "The checkpoint lacks the best weights of the current chain-thaw stage.",
                    location=str(directory / _BEST_WEIGHTS),
                    hint="resume a chain-thaw run from a checkpoint in its output directory, or train from the start.",
                )
            self._best_weights = load_file(directory / _BEST_WEIGHTS, str(self._model.device))
            self._best_score = json.loads((directory / _BEST_SCORE).read_text(encoding="utf-8"))

    def stage(self, step: int) -> int:
        """Index of the stage that contains the step after `step` steps."""
        return min(step * len(self.stages) // self._total_steps, len(self.stages) - 1)

    def _is_stage_end(self, step: int) -> bool:
        return step == self._total_steps or self.stage(step) != self.stage(step - 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze and unfreeze groups, and set the learning rates."""
        step = state.global_step
        stage = self.stage(step)
        if step == 0 or self._is_stage_end(step):
            self._optimizer.state.clear()
            self._best_weights, self._best_score = {}, float("inf")
        self.train_groups(self.stages[stage])
        rate = self._rate if stage else self._first_rate
        for group, ratio in zip(self._optimizer.param_groups, self._lr_ratios, strict=True):
            group["lr"] = rate * ratio

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request an evaluation at the end of a stage."""
        if self._is_stage_end(state.global_step):
            control.should_evaluate = True

    @torch.no_grad()
    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Store the best weights of the stage, and restore them at its end."""
        if not state.global_step:  # Trainer can evaluate before training
            return
        metrics = metrics or {}
        if self._metric not in metrics:
            raise CtxError(f"The evaluation has no metric {self._metric!r}.", hint=f"use one of {', '.join(metrics)}.")
        if metrics[self._metric] < self._best_score or not self._best_weights:
            self._best_score = metrics[self._metric]
            self._best_weights = {name: weight.detach().clone() for name, weight in self._trained_weights().items()}
        elif self._is_stage_end(state.global_step):
            for name, weight in self._trained_weights().items():
                weight.copy_(self._best_weights[name])
            control.should_evaluate = True

    def on_save(self, args: Any, state: Any, control: Any, checkpoint: Path | None = None, **kwargs: Any) -> None:
        """Write the best weights of the stage into the checkpoint."""
        if not state.is_world_process_zero:
            return
        directory = checkpoint_directory(args, state, checkpoint)
        write_tensors(directory / _BEST_WEIGHTS, self._best_weights)
        (directory / _BEST_SCORE).write_text(json.dumps(self._best_score), encoding="utf-8")

    def _trained_weights(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}


class ThreeStageUnfreezing(LayerUnfreezing):
    """Unfreezing in three stages with a fading language modeling loss (Chronopoulou et al. 2019, arXiv 1902.10547):
    the new layers are trained from the start, the encoder's layers later, and its embeddings last.

    Args:
        model: The model, not wrapped; with `lm_weights` a head with an auxiliary language modeling loss
            (`has_auxiliary_lm_loss`).
        epochs: Passes over the data before the encoder's layers, and before its embeddings are trained; as released.
        lm_weights: Weight of the auxiliary loss at the first and the last step, decaying exponentially; released: 0.2
            and 0.1. None leaves `config.lm_loss_weight`.

    Raises:
        CtxError: The head has no such loss, the model no heads, or a value is out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        epochs: tuple[float, float] = (1.0, 4.0),
        lm_weights: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(model)
        if not has_heads(model) or len(self._layer_groups) < 3:
            raise CtxError(
                f"{type(model).__name__} does not have embeddings, layers and heads to be unfrozen in turn.",
                hint="use another --freeze method.",
            )
        if not 0 <= epochs[0] <= epochs[1]:
            raise CtxError(
                "The layers must be unfrozen before the embeddings.",
                location=f"--freeze three-stage:layers_epoch={epochs[0]},embeddings_epoch={epochs[1]}",
                hint="use two numbers of passes over the data, the lower one first.",
            )
        if lm_weights is not None:
            location = f"--freeze three-stage:lm_weights={lm_weights[0]:g},{lm_weights[1]:g}"
            if not getattr(model, "has_auxiliary_lm_loss", False):
                raise CtxError(
                    f"{type(model).__name__} has no auxiliary language modeling loss.",
                    location=location,
                    hint="remove it, or use a family whose heads have one: gpt, grover.",
                )
            if not 0 < lm_weights[1] <= lm_weights[0]:
                raise CtxError(
                    "The weight of the auxiliary loss must be above 0 and must not increase.",
                    location=location,
                    hint="use two numbers, the larger one first, for example lm_weights=0.2,0.1.",
                )
        self._epochs, self._lm_weights = epochs, lm_weights
        self._config_lm_weight = getattr(model.config, "lm_loss_weight", None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert epochs to steps; raises CtxError if the run ends before the last stage, or the data is a stream."""
        super().on_train_begin(args, state, control, **kwargs)
        if not state.num_train_epochs:
            raise CtxError("The epochs of a stream are unknown.", hint="train on a file that is read completely.")
        steps_per_epoch = round(state.max_steps / state.num_train_epochs, 9)  # without the quotient's rounding error
        self._stage_starts = [round(epoch * steps_per_epoch) for epoch in self._epochs]
        self._total_steps = state.max_steps
        if self._stage_starts[1] >= state.max_steps:
            raise CtxError(
                f"The run ends after {state.num_train_epochs:.3g} epochs, before the embeddings are trained.",
                location=f"--freeze three-stage:layers_epoch={self._epochs[0]:g},embeddings_epoch={self._epochs[1]:g}",
                hint="train longer (--num_train_epochs), or unfreeze earlier (layers_epoch=1,embeddings_epoch=2).",
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze and unfreeze groups, and set the weight of the auxiliary loss."""
        frozen_stages = sum(state.global_step < start for start in self._stage_starts)
        lowest_group = (0, 1, len(self._layer_groups) - 1)[frozen_stages]
        self.train_groups(range(lowest_group, len(self._layer_groups)))
        if self._lm_weights is not None:
            first, last = self._lm_weights
            progress = state.global_step / max(1, self._total_steps - 1)
            self._model.config.lm_loss_weight = first * (last / first) ** progress

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unfreeze all groups and restore the configuration's weight of the auxiliary loss."""
        super().on_train_end(args, state, control, **kwargs)
        if self._lm_weights is not None:
            self._model.config.lm_loss_weight = self._config_lm_weight
