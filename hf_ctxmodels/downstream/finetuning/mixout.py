"""Mixout (Lee et al. 2020, arXiv 1909.11299): some inputs of each linear map meet the pretrained weights."""

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.finetuning.anchoring import pretrained_parameters
from hf_ctxmodels.downstream.finetuning.fisher import weights_digest
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.training.callbacks import FinetuningCallback


class Mixout(FinetuningCallback):
    """Trains with mixed weights: in the weights of every linear map of the encoder, a random share of the columns, the
    inputs, is that of the pretrained weights, as in the released code.

    With a mask m of columns, 1 with probability p, the weights are (m * start + (1 - m) * w - p * start) / (1 - p),
    whose expectation is w. Recurrent layers' weights are mixed alike.

    The weights are mixed in place for the passes of an optimizer step, and are themselves again for the update: so
    every implementation of a linear map acts on them, evaluation and checkpoints have the plain weights, and all
    micro-batches and processes of a step share the mask, which is drawn by seed, step and parameter. The released code
    draws one for each forward pass, and switches dropout off (here: `--config_options hidden_dropout_prob=0`).

    Args:
        model: The model with its pretrained weights, which are copied here: before a checkpoint of the run is opened.
        probability: p, from 0 to below 1.
        seed: Of the masks.

    Raises:
        CtxError: p is out of range, or the encoder has no linear maps to mix.
    """

    requires_full_weights = True

    def __init__(self, model: PreTrainedModel, probability: float, seed: int = 0) -> None:
        if not 0 <= probability < 1:
            raise CtxError(
                "Mixout takes the pretrained weights with a probability from 0 to below 1.",
                location=f"--mixout {probability:g}",
                hint="use 0.9 or less; to keep the encoder as it is, use --freeze encoder.",
            )
        self._probability, self._seed = probability, seed
        self.mixed = _column_weights(model)
        self._starts = [parameter.detach().clone() for parameter in self.mixed.values()]
        self._kept: list[Tensor] = []
        self._factors: list[Tensor] = []

    @property
    def identity(self) -> dict[str, str]:
        """The digest of the pretrained weights."""
        return {"mixout_start": weights_digest(dict(zip(self.mixed, self._starts, strict=True)))}

    def mask(self, step: int, number: int, columns: int) -> Tensor:
        """(columns,) bool of the inputs that meet the pretrained weights in the step after `step` steps.

        Args:
            step: Optimizer steps so far.
            number: The parameter's, in the order of `mixed`.
            columns: The parameter's.
        """
        draws = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, step, number))))
        return torch.from_numpy(draws.random(columns) < self._probability)

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Mix the weights."""
        self._kept, self._factors, share = [], [], 1 - self._probability
        for number, (parameter, start) in enumerate(zip(self.mixed.values(), self._starts, strict=True)):
            pretrained = self.mask(step, number, parameter.shape[-1]).to(parameter.device)
            factor = (~pretrained).to(parameter.dtype) / share
            self._kept.append(parameter.detach().clone())
            self._factors.append(factor)
            parameter.copy_(start + factor * (parameter - start))

    @torch.no_grad()
    def before_update(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Restore the weights; their gradient is that of the mixed ones times the share they have in them."""
        for parameter, kept, factor in zip(self.mixed.values(), self._kept, self._factors, strict=False):
            parameter.copy_(kept)
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._kept, self._factors = [], []
        return {}


def _column_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The pretrained weights of the encoder whose last axis is that of inputs: of linear maps and recurrent layers.

    Raises:
        CtxError: There are none.
    """
    encoder, pretrained = model.base_model, pretrained_parameters(model)
    maps = [module for module in encoder.modules() if isinstance(module, nn.Linear | LSTM | GRU)]
    wanted = {id(each) for module in maps for each in module.parameters(recurse=False) if each.ndim >= 2}
    biases = {id(each) for module in maps for name, each in module.named_parameters(recurse=False) if "bias" in name}
    found = {name: each for name, each in pretrained.items() if id(each) in wanted - biases}
    if not found:
        raise CtxError(
            f"The encoder of {type(model).__name__} has no linear maps.", location="--mixout", hint="leave it out."
        )
    return found
