"""The model base of recurrent families."""

import torch
from torch import nn

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM


class RecurrentPreTrainedModel(CtxPreTrainedModel):
    """The common model base of families with LSTM or GRU layers."""

    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LSTM | GRU):
            module.reset_parameters()
        else:
            super()._init_weights(module)
