"""Mixout (Lee et al. 2020, arXiv 1909.11299): dropout towards the pretrained weights."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.downstream.finetuning.l2_sp import pretrained_parameters
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM
from hf_ctxmodels.training.callbacks import FinetuningCallback


class Mixout(FinetuningCallback):
    """Replaces a random subset of the weight columns (inputs) of each linear or recurrent layer of the encoder by the
    pretrained ones during the passes of a step, as in the released code.

    With a mask m of columns, 1 with probability p, the mixed weights are
    (m * w_0 + (1 - m) * w - p * w_0) / (1 - p), whose expectation is w.

    The weights are mixed in place for the passes of an optimizer step and restored for the update, so evaluation and
    checkpoints use the unmixed weights. All micro-batches and processes of a step share the mask, which is sampled by
    seed, step and parameter. The released code samples a mask for each forward pass and disables dropout (here:
    `--config_options hidden_dropout_prob=0`).

    Args:
        model: The model with its pretrained weights, which are copied here: before a checkpoint of the run is loaded.
        probability: p, from 0 to below 1.
        seed: Seed of the masks.

    Attributes:
        mixed: The mixed parameters by their names in the encoder.

    Raises:
        CtxError: p is out of range, or the encoder has no linear layers to mix.
    """

    requires_full_weights = True

    def __init__(self, model: PreTrainedModel, probability: float, seed: int = 0) -> None:
        if not 0 <= probability < 1:
            raise CtxError(
                "The mixout probability must be from 0 to below 1.",
                location=f"--anchor mixout:probability={probability:g}",
                hint="use 0.9 or less; to keep the encoder unchanged, use --freeze encoder.",
            )
        self._probability, self._seed = probability, seed
        layers = [module for module in model.base_model.modules() if isinstance(module, nn.Linear | LSTM | GRU)]
        weight_ids = {
            id(parameter)
            for layer in layers
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.ndim >= 2 and "bias" not in name
        }
        self.mixed = {name: weight for name, weight in pretrained_parameters(model).items() if id(weight) in weight_ids}
        if not self.mixed:
            raise CtxError(
                f"The encoder of {type(model).__name__} has no linear layers.",
                location="--anchor mixout",
                hint="remove it.",
            )
        self._pretrained = [parameter.detach().clone() for parameter in self.mixed.values()]
        self._unmixed: list[Tensor] = []
        self._factors: list[Tensor] = []

    @property
    def identity(self) -> dict[str, str]:
        """The digest of the pretrained weights."""
        return {"mixout_start": weights_digest(dict(zip(self.mixed, self._pretrained, strict=True)))}

    def mask(self, step: int, index: int, columns: int) -> Tensor:
        """(columns,) bool: the columns of the parameter `mixed[index]` with pretrained weights, after `step` steps."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, step, index))))
        return torch.from_numpy(generator.random(columns) < self._probability)

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mix the weights."""
        self._unmixed, self._factors = [], []
        for index, (parameter, pretrained) in enumerate(zip(self.mixed.values(), self._pretrained, strict=True)):
            mask = self.mask(state.global_step, index, parameter.shape[-1]).to(parameter.device)
            factor = (~mask).to(parameter.dtype) / (1 - self._probability)
            self._unmixed.append(parameter.detach().clone())
            self._factors.append(factor)
            parameter.copy_(pretrained + factor * (parameter - pretrained))

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the weights; their gradient is the gradient of the mixed weights times their factor in these."""
        for parameter, unmixed, factor in zip(self.mixed.values(), self._unmixed, self._factors, strict=False):
            parameter.copy_(unmixed)
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._unmixed, self._factors = [], []
