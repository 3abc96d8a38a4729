"""Which layers are trained when: gradual unfreezing, chain-thaw, and unfreezing in three stages."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.callbacks import TrainingRun
from hf_ctxmodels.training.optim.gradual_unfreezing import LayerUnfreezing
from hf_ctxmodels.training.optim.layer_groups import has_heads

_BEST_WEIGHTS = "best_of_stage.safetensors"
_BEST_SCORE = "best_of_stage.json"


class ChainThaw(LayerUnfreezing):
    """Chain-thaw (Felbo et al. 2017, arXiv 1708.00524, section 3.2): the heads alone, each group of layers alone from
    the embeddings up, and all together.

    Every stage has an equal share of the run. It begins with a new optimizer state, and ends with the weights of its
    best evaluation; there is one at each stage's end. The released code has stages without a fixed length, each until
    five evaluations in a row are no better.

    Args:
        model: As for `LayerUnfreezing`.
        first_rate, rate: Learning rate of the first stage and of the others, constant within a stage; that of the
            schedule is not used. Groups of parameters with rates of their own keep the ratio to the optimizer's.
        metric: The metric of an evaluation by which the best is chosen, the lower the better.

    Raises:
        CtxError: The model has no heads.
    """

    def __init__(
        self, model: PreTrainedModel, first_rate: float = 1e-3, rate: float = 1e-4, metric: str = "eval_loss"
    ) -> None:
        super().__init__(model)
        if not has_heads(model) or len(self._groups) < 2:
            raise CtxError(f"{type(model).__name__} has no heads above trainable layers.", hint="leave out chain-thaw.")
        last = len(self._groups) - 1
        self.stages = [[last], *([depth] for depth in range(last)), list(range(last + 1))]
        self._first_rate, self._rate, self._metric = first_rate, rate, metric
        self._best: dict[str, torch.Tensor] = {}
        self._score = float("inf")

    def start(self, run: TrainingRun) -> None:
        """Divide the run.

        Raises:
            CtxError: There is no validation data, the run is too short, or the optimizer's state cannot begin anew.
        """
        if not run.evaluates:
            raise CtxError("Chain-thaw chooses weights by evaluations.", hint="give validation data.")
        if run.total_steps < len(self.stages):
            raise CtxError(
                f"Chain-thaw has {len(self.stages)} stages, but the run has {run.total_steps} steps.",
                hint=f"train for {len(self.stages)} steps or more.",
            )
        if isinstance(run.optimizer, torch.optim.Adagrad | torch.optim.ASGD):
            raise CtxError(
                f"{type(run.optimizer).__name__} averages over the whole run, chain-thaw begins anew at every stage.",
                hint="use --optimizer adamw.",
            )
        self._optimizer, self._total = run.optimizer, run.total_steps
        groups = run.optimizer.param_groups
        self._ratios = [group["lr"] / groups[0]["lr"] for group in groups]

    def stage(self, step: int) -> int:
        """The number of the stage that the step after `step` steps belongs to."""
        return min(step * len(self.stages) // self._total, len(self.stages) - 1)

    def _ends(self, step: int) -> bool:
        """Whether a stage ends after `step` steps."""
        return step == self._total or self.stage(step) != self.stage(step - 1)

    def before_step(self, step: int) -> None:
        """Freeze and unfreeze; set the rates."""
        number = self.stage(step)
        if step == 0 or self._ends(step):
            self._optimizer.state.clear()
            self._best, self._score = {}, float("inf")
        self.train_groups(self.stages[number])
        rate = self._rate if number else self._first_rate
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    def evaluates_after(self, step: int) -> bool:
        """At the end of a stage."""
        return self._ends(step)

    @torch.no_grad()
    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Remember the best weights of the stage, and restore them at its end."""
        if self._metric not in metrics:
            raise CtxError(
                f"The evaluation has no {self._metric}.", hint=f"choose the best by one of {', '.join(metrics)}."
            )
        if metrics[self._metric] < self._score or not self._best:
            self._score = metrics[self._metric]
            self._best = {name: value.detach().clone() for name, value in self._trained().items()}
            return False
        if not self._ends(step):
            return False
        for name, value in self._trained().items():
            value.copy_(self._best[name])
        return True

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def save(self, directory: Path) -> None:
        """Write the best weights of the stage."""
        best = {name: value.cpu().contiguous() for name, value in self._best.items()}
        save_file(best, directory / _BEST_WEIGHTS)
        (directory / _BEST_SCORE).write_text(json.dumps(self._score), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore them."""
        device = self._model.device
        self._best = {name: value.to(device) for name, value in load_file(directory / _BEST_WEIGHTS).items()}
        self._score = json.loads((directory / _BEST_SCORE).read_text(encoding="utf-8"))


class ThreeStageUnfreezing(LayerUnfreezing):
    """Unfreezing in three stages, with a language modelling loss that fades (Chronopoulou et al. 2019, arXiv
    1902.10547): the new layers from the start, the encoder's layers later, and its embeddings last.

    Args:
        model: As for `LayerUnfreezing`; with `lm_weights` a head with an auxiliary language modelling loss
            (`heads.WithLanguageModeling`).
        epochs: Passes over the data before the encoder's layers are trained, and before its embeddings are; 1 and 4 in
            the released configuration, which counts them from 1: epochs 2 and 5.
        lm_weights: The weight of the auxiliary loss at the first and the last step, falling exponentially; exp(-1.6)
            to exp(-2.3), 0.2 to 0.1, in the released configuration. None leaves `config.lm_loss_weight`.

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
        if not has_heads(model) or len(self._groups) < 3:
            raise CtxError(
                f"{type(model).__name__} has no embeddings, layers and heads to be trained one after the other.",
                hint="leave out the three stages.",
            )
        if not 0 <= epochs[0] <= epochs[1]:
            raise CtxError(
                "The layers are trained before the embeddings.",
                location=f"--thaw_epochs {epochs[0]} {epochs[1]}",
                hint="give two numbers of passes over the data, the lower one first.",
            )
        if lm_weights is not None:
            _check_lm_weights(model, lm_weights)
        self._epochs, self._lm_weights = epochs, lm_weights
        self._own_weight = getattr(model.config, "lm_loss_weight", None)

    def start(self, run: TrainingRun) -> None:
        """Count the steps.

        Raises:
            CtxError: The run ends before the last stage, or the data is a stream.
        """
        if run.steps_per_epoch is None:
            raise CtxError("The passes over a stream are not known.", hint="train on a file that is read completely.")
        self._starts = [round(epoch * run.steps_per_epoch) for epoch in self._epochs]
        self._total = run.total_steps
        if self._starts[1] >= run.total_steps:
            raise CtxError(
                f"The run ends after {run.total_steps / run.steps_per_epoch:.3g} passes over the data, before the "
                "embeddings are trained.",
                location=f"--thaw_epochs {self._epochs[0]:g} {self._epochs[1]:g}",
                hint="train longer (--num_train_epochs), or unfreeze earlier (--thaw_epochs 1 2).",
            )

    def lm_weight(self, step: int) -> float | None:
        """The weight of the auxiliary loss in the step after `step` steps."""
        if self._lm_weights is None:
            return self._own_weight
        first, last = self._lm_weights
        return first * (last / first) ** (step / max(1, self._total - 1))

    def before_step(self, step: int) -> None:
        """Freeze and unfreeze; set the weight of the auxiliary loss."""
        lowest = sum(step < start for start in self._starts)  # 2: the heads alone; 1: the layers too; 0: all
        first = (0, 1, len(self._groups) - 1)[lowest]
        self.train_groups(range(first, len(self._groups)))
        if self._lm_weights is not None:
            self._model.config.lm_loss_weight = self.lm_weight(step)

    def finish(self) -> None:
        """Unfreeze all; the configuration has its own weight again."""
        super().finish()
        if self._lm_weights is not None:
            self._model.config.lm_loss_weight = self._own_weight


def _check_lm_weights(model: PreTrainedModel, weights: tuple[float, float]) -> None:
    """Raise CtxError for a head without the loss, or weights that do not fall."""
    location = f"--lm_weights {weights[0]:g} {weights[1]:g}"
    if not isinstance(model, heads.WithLanguageModeling):
        raise CtxError(
            f"{type(model).__name__} has no auxiliary language modelling loss.",
            location=location,
            hint="leave it out, or take a family whose heads have one: gpt, grover.",
        )
    if not 0 < weights[1] <= weights[0]:
        raise CtxError(
            "The weight of the auxiliary loss falls from one number above 0 to another.",
            location=location,
            hint="give two numbers, the larger one first, for example 0.2 0.1.",
        )
