"""L2-SP, a penalty on the distance from the pretrained weights (Li et al. 2018, arXiv 1802.01483)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.model_loading import loaded_names
from hf_ctxmodels.training.optimizers import unwrap_optimizer


def pretrained_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable encoder parameters that were loaded from the checkpoint (`loaded_names`), by their names in the
    encoder; raises CtxError if there are none."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    parameters = {
        name.removeprefix(prefix): parameter
        for name in loaded_names(model)
        if name.startswith(prefix) and (parameter := model.get_parameter(name)).requires_grad
    }
    if not parameters:
        raise CtxError(
            f"{type(model).__name__} has no trainable weights of a pretrained encoder.",
            hint="remove --anchor if the encoder is frozen or completely re-initialized.",
        )
    return parameters


class L2SPPenalty(FinetuningCallback):
    """Adds half the weighted squared distance of the encoder from its pretrained weights to the loss (equation 2,
    L2-SP): weight / 2 * ||w - w_0||^2, and head_weight / 2 * ||v||^2 for the new parameters v.

    The gradient is added once in a step. Weight decay is disabled for the anchored parameters. New rows of the word
    embeddings (`model.num_new_tokens`) are not anchored.

    Args:
        model: The model with its pretrained weights, which are copied here: before a checkpoint of the run is loaded.
        head_weight: Weight of the L2 penalty on new parameters; 0 for none.

    Attributes:
        anchored: The anchored parameters by their names in the encoder.
        pretrained: Their pretrained values.

    Raises:
        CtxError: A weight is negative, or there is no parameter to anchor.
    """

    requires_full_weights = True

    def __init__(self, model: PreTrainedModel, weight: float, head_weight: float = 0.0) -> None:
        if weight < 0 or head_weight < 0:
            raise CtxError(
                "The weight of a penalty must be 0 or more.",
                location=f"--anchor weight={weight},head_weight={head_weight}",
                hint="use 0.01, for example.",
            )
        self._weight, self._head_weight = weight, head_weight
        self.anchored = pretrained_parameters(model)
        self.pretrained = {name: parameter.detach().clone() for name, parameter in self.anchored.items()}
        anchored_ids = {id(parameter) for parameter in self.anchored.values()}
        trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
        self._new_parameters = [parameter for parameter in trainable if id(parameter) not in anchored_ids]
        self._row_masks: dict[str, Tensor] = {}  # word embeddings with new tokens: (vocabulary, 1), 0 for new rows
        if new_tokens := getattr(model, "num_new_tokens", 0):
            embeddings: Any = model.get_input_embeddings().weight
            mask = torch.ones(len(embeddings), 1, device=embeddings.device)
            mask[-new_tokens:] = 0
            self._row_masks = {name: mask for name, parameter in self.anchored.items() if parameter is embeddings}

    @property
    def identity(self) -> dict[str, Any]:
        """The digest of the pretrained weights."""
        return {"start_weights": weights_digest(self.pretrained)}

    def importance(self, name: str) -> Tensor | float:
        """Factor of a parameter's squared distance, per weight, per row or for all: 1, and 0 for new rows."""
        return self._row_masks.get(name, 1.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Disable weight decay for the anchored parameters; raises CtxError for sharded weights, or if a schedule
        exists (Trainer)."""
        super().on_train_begin(args, state, control, **kwargs)
        disable_weight_decay(unwrap_optimizer(optimizer), list(self.anchored.values()))

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """The value of the penalty, 0-dimensional."""
        terms = [
            (self.importance(name) * (parameter - self.pretrained[name]).float().square()).sum()
            for name, parameter in self.anchored.items()
        ]
        total = self._weight / 2 * torch.stack(terms).sum()
        if self._head_weight and self._new_parameters:
            squares = [parameter.float().square().sum() for parameter in self._new_parameters]
            total += self._head_weight / 2 * torch.stack(squares).sum()
        return total

    @torch.no_grad()
    def on_pre_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        gradient_scale: float = 1.0,
        logs: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradient of the penalty for parameters that are not frozen; log its value as "anchor_loss"."""
        for name, parameter in self.anchored.items():
            distance = (parameter - self.pretrained[name]) * self.importance(name)
            _add_gradient(parameter, distance * (self._weight * gradient_scale))
        for parameter in self._new_parameters if self._head_weight else ():
            _add_gradient(parameter, parameter * (self._head_weight * gradient_scale))
        if logs is not None:
            logs["anchor_loss"] = self.penalty()


def disable_weight_decay(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Move parameters to groups without weight decay; raises CtxError if a schedule was already made for the groups."""
    undecayed_ids = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        undecayed = [parameter for parameter in group["params"] if id(parameter) in undecayed_ids]
        if not group.get("weight_decay") or not undecayed:
            groups.append(group)
            continue
        if "initial_lr" in group:
            raise CtxError(
                "Weight decay pulls anchored weights towards zero.",
                hint="use TrainingArguments(weight_decay=0), or an optimizer after `disable_weight_decay`.",
            )
        if decayed := [parameter for parameter in group["params"] if id(parameter) not in undecayed_ids]:
            groups.append({**group, "params": decayed})
        groups.append({**group, "params": undecayed, "weight_decay": 0.0})
    optimizer.param_groups[:] = groups


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to the gradient, which may be sparse, of a parameter that is not frozen."""
    if parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
