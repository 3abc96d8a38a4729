"""GRU layers over packed sequences, with one or two directions."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.recurrence import (
    GRU_GATES,
    StepOptions,
    computation_dtype,
    gru_recurrence,
    input_gates,
)
from hf_ctxmodels.layers.recurrent.scan import scan_gru


class GRUState(NamedTuple):
    """The state of a layer.

    Attributes:
        hidden: (directions, sequences, hidden) hidden state: the last output.
    """

    hidden: Tensor


class GRU(nn.Module):
    """One layer of gated recurrent units, with one direction or two independent ones.

    The gates are reset, update and candidate, in this order (Cho et al. 2014, arXiv 1406.1078; the reset gate comes
    after the product, as in `torch.nn.GRU`). At every step:

        candidate = tanh(W x + b + sigmoid(reset) * (U h + c))
        h = (1 - sigmoid(update)) * candidate + sigmoid(update) * h

    Args:
        input_size: Width of the input.
        hidden_size: Width of the hidden state, which is the output.
        directions: 1 or 2.
    """

    initializes_itself = True

    def __init__(self, input_size: int, hidden_size: int, *, directions: int = 2) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input_weight = nn.Parameter(torch.empty(directions, GRU_GATES * hidden_size, input_size))
        self.state_weight = nn.Parameter(torch.empty(directions, GRU_GATES * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(directions, GRU_GATES * hidden_size))
        self.state_bias = nn.Parameter(torch.empty(directions, GRU_GATES * hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(hidden), the initialisation of `torch.nn.GRU`."""
        for parameter in self.parameters():
            init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def zero_state(self, num_sequences: int) -> GRUState:
        """The initial state, zeros."""
        return GRUState(self.bias.new_zeros(len(self.bias), num_sequences, self.hidden_size))

    def forward(
        self, packed: Tensor, packing: PackedSequences, state: Iterable[Tensor] | None = None
    ) -> tuple[Tensor, GRUState]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) from `packing.pack`.
            packing: The tokens of the batch.
            state: Initial hidden state from `packing.pack_state`; None for zeros.

        Returns:
            (directions, tokens, hidden), and the state after the last token of each sequence.
        """
        dtype, without_autocast = computation_dtype(packed)
        (hidden,) = self.zero_state(packing.order.shape[0]) if state is None else state
        gated = 2 * self.hidden_size
        with without_autocast:
            bias = torch.cat([self.bias[:, :gated] + self.state_bias[:, :gated], self.bias[:, gated:]], 1)
            gates = input_gates(self, packed.to(dtype), bias.to(dtype))
            hidden, state_weight = hidden.to(dtype), self.state_weight.to(dtype)
            candidate_bias = self.state_bias[:, gated:].to(dtype)
            token_mask, restarts = packing.token_mask, packing.restarts
            if torch.compiler.is_compiling():
                if torch.compiler.is_exporting():
                    recurrence: Any = scan_gru
                else:
                    from hf_ctxmodels.layers.recurrent.custom_ops import gru_custom_op as recurrence
                outputs, hidden = recurrence(gates, hidden, state_weight, candidate_bias, token_mask, restarts)
            else:
                steps = packing.steps if token_mask is None else (packing.shape[0],) * packing.shape[1]
                options = StepOptions(steps, token_mask=token_mask, restarts=restarts)
                outputs, hidden = gru_recurrence(gates, hidden, state_weight, candidate_bias, options)
        return outputs, GRUState(hidden)
