"""Penalties on the distance from the pretrained weights: L2 to the start, and elastic weight consolidation."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.finetuning.fisher import load_fisher, weights_digest
from hf_ctxmodels.training.callbacks import FinetuningCallback, TrainingRun


def pretrained_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable parameters of the encoder that are those of the opened checkpoint, by their names in the encoder.

    All others are new: the heads, what `newly_initialized_modules` names of the encoder, for example a pooler, and what was
    `reinitialized_weights`.

    Raises:
        CtxError: There are none.
    """
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    new = tuple(f"{name}." for name in getattr(model, "newly_initialized_modules", ()))
    drawn = set(getattr(model, "reinitialized_weights", ()))
    found = {
        name.removeprefix(prefix): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.requires_grad and not name.startswith(new) and name not in drawn
    }
    if not found:
        raise CtxError(
            f"{type(model).__name__} has no trainable weights of a pretrained encoder.",
            hint="leave out --anchor and --mixout where the encoder is frozen or all of it is drawn anew.",
        )
    return found


class L2SPPenalty(FinetuningCallback):
    """Adds half the weighted squared distance of the encoder from its pretrained weights to the loss (Li et al. 2018,
    arXiv 1802.01483, equation 2, L2-SP): weight / 2 * ||w - start||^2, and head_weight / 2 * ||v||^2 of the new
    parameters v.

    Its gradient is added once in a step, whatever the micro-batches and processes. Weight decay, which pulls towards
    zero, is switched off for the anchored parameters, and stays as it is for the others. Rows of the table of words
    that the checkpoint did not have (`model.num_new_tokens`) are not held.

    Args:
        model: The model with its pretrained weights, which are copied here: before a checkpoint of the run is opened.
        weight: Of the penalty.
        head_weight: Of the plain L2 penalty on new parameters; 0 for none.

    Raises:
        CtxError: A weight is negative, or nothing is anchored.
    """

    requires_full_weights = True

    def __init__(self, model: PreTrainedModel, weight: float, head_weight: float = 0.0) -> None:
        if weight < 0 or head_weight < 0:
            raise CtxError(
                "The weight of a penalty is 0 or more.",
                location=f"--anchor_weight {weight} --anchor_head_weight {head_weight}",
                hint="give 0.01, for example.",
            )
        self._weight, self._head_weight = weight, head_weight
        self.anchored = pretrained_parameters(model)
        self.starts = {name: value.detach().clone() for name, value in self.anchored.items()}
        anchored = {id(parameter) for parameter in self.anchored.values()}
        self._others = [each for each in model.parameters() if each.requires_grad and id(each) not in anchored]
        self._importance = _known_rows(model, self.anchored)

    @property
    def identity(self) -> dict[str, Any]:
        """The digest of the pretrained weights."""
        return {"start_weights": weights_digest(self.starts)}

    def importance(self, name: str) -> Tensor | float:
        """How much a parameter's squared distance counts, per weight, row or for all: 1, and 0 for new rows."""
        return self._importance.get(name, 1.0)

    def start(self, run: TrainingRun) -> None:
        """Switch weight decay off for the anchored parameters, in groups of their own.

        Raises:
            CtxError: The schedule exists already, and an anchored parameter has weight decay, as under Trainer.
        """
        without_decay(run.optimizer, list(self.anchored.values()))

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """The value, 0-dimensional."""
        terms = [
            (self.importance(name) * (parameter - self.starts[name]).float().square()).sum()
            for name, parameter in self.anchored.items()
        ]
        total = self._weight / 2 * torch.stack(terms).sum()
        if self._head_weight and self._others:
            total += self._head_weight / 2 * torch.stack([each.float().square().sum() for each in self._others]).sum()
        return total

    @torch.no_grad()
    def before_update(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Add the penalty's gradient, for parameters that are trained now; gives its value as "anchor_loss"."""
        for name, parameter in self.anchored.items():
            pull = (parameter - self.starts[name]) * self.importance(name)
            _add_gradient(parameter, pull * (self._weight * scale))
        for parameter in self._others if self._head_weight else ():
            _add_gradient(parameter, parameter * (self._head_weight * scale))
        return {"anchor_loss": self.penalty()}


class ElasticWeightConsolidation(L2SPPenalty):
    """`L2SPPenalty` with each weight's squared distance times its Fisher information in pretraining (Kirkpatrick et al.
    2017, arXiv 1612.00796, equation 3): weight / 2 * sum of F * (w - start)^2.

    Args:
        model, weight, head_weight: As for `L2SPPenalty`.
        fisher_file: Of `fisher.save_fisher`, for the same pretrained weights.

    Raises:
        CtxError: The file is missing, damaged, or that of other weights.
    """

    def __init__(
        self, model: PreTrainedModel, weight: float, fisher_file: str | Path, head_weight: float = 0.0
    ) -> None:
        super().__init__(model, weight, head_weight)
        fisher, digests = load_fisher(fisher_file)
        known = [name for name in fisher if name in self.starts]  # a pooler, for example, may not be there
        starts = {name: self.starts[name][: len(fisher[name])] for name in known}  # without the rows of new tokens
        strange = [name for name in known if weights_digest({name: starts[name]}) != digests[name]]
        if strange or not known:
            raise CtxError(
                "The Fisher information is that of other weights" + (f": of {strange[0]}." if strange else "."),
                location=f"--fisher_file {fisher_file}",
                hint="give the file that was computed from this --model, or the name of a new one and --fisher_text.",
            )
        self._fisher = {name: _with_new_rows(fisher[name], self.starts[name]) for name in known}

    @property
    def identity(self) -> dict[str, Any]:
        """The digests of the pretrained weights and the Fisher information."""
        return {**super().identity, "fisher": weights_digest(self._fisher)}

    def importance(self, name: str) -> Tensor | float:
        """The parameter's Fisher information; 0 for one that pretraining does not use, and for new rows."""
        return self._fisher.get(name, 0.0)


def _known_rows(model: PreTrainedModel, anchored: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """For the table of words, if it has new rows: (rows, 1) of 1 for those of the checkpoint, and 0."""
    new = getattr(model, "num_new_tokens", 0)
    if not new:
        return {}
    table: Any = model.get_input_embeddings().weight
    known = torch.ones(len(table), 1, device=table.device)
    known[-new:] = 0
    return {name: known for name, each in anchored.items() if each is table}


def _with_new_rows(fisher: Tensor, start: Tensor) -> Tensor:
    """Fisher information with 0 for the rows that the parameter has beyond it, on the parameter's device."""
    found = torch.zeros(start.shape, dtype=fisher.dtype, device=start.device)
    found[: len(fisher)] = fisher
    return found


def without_decay(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Give parameters of an optimizer groups without weight decay.

    Raises:
        CtxError: A schedule was made for the groups as they are.
    """
    spared = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        moved = [each for each in group["params"] if id(each) in spared]
        if not group.get("weight_decay") or not moved:
            groups.append(group)
            continue
        if "initial_lr" in group:
            raise CtxError(
                "Weight decay pulls anchored weights towards zero.",
                hint="give TrainingArguments(weight_decay=0), or an optimizer after `without_decay`.",
            )
        if kept := [each for each in group["params"] if id(each) not in spared]:
            groups.append({**group, "params": kept})
        groups.append({**group, "params": moved, "weight_decay": 0.0})
    optimizer.param_groups[:] = groups


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient, which may be sparse; nothing for one that is frozen now."""
    if parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
