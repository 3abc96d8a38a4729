"""Gated recurrent units over packed rows, in one direction or both."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.linear import linear
from hf_ctxmodels.layers.recurrent.gru_recurrence import GATES, recur, recurrence_in_a_graph
from hf_ctxmodels.layers.recurrent.lstm import PackedRows


class GRUState(NamedTuple):
    """What a layer remembers of every row.

    Attributes:
        hidden: (directions, rows, hidden) its last output.
    """

    hidden: Tensor


class GRU(nn.Module):
    """One layer of gated recurrent units, in one direction or two that do not see each other.

    Of the gates reset, update and candidate, in this order, of every step (Cho et al. 2014, arXiv 1406.1078, with the
    reset behind the product, as in `torch.nn.GRU`):

        candidate = tanh(W x + b + sigmoid(reset) * (U h + c))
        h = (1 - sigmoid(update)) * candidate + sigmoid(update) * h

    Args:
        input_size: Width of the input.
        hidden_size: Width of the state, which is the output.
        directions: 1 or 2.
    """

    def __init__(self, input_size: int, hidden_size: int, *, directions: int = 2) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input_weight = nn.Parameter(torch.empty(directions, GATES * hidden_size, input_size))
        self.state_weight = nn.Parameter(torch.empty(directions, GATES * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(directions, GATES * hidden_size))
        self.state_bias = nn.Parameter(torch.empty(directions, GATES * hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(hidden), as `torch.nn.GRU` starts, and with it the released models."""
        for parameter in self.parameters():
            init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def zero_state(self, rows: int) -> GRUState:
        """A state that remembers nothing."""
        return GRUState(self.bias.new_zeros(len(self.bias), rows, self.hidden_size))

    def forward(self, packed: Tensor, rows: PackedRows, state: GRUState | None = None) -> tuple[Tensor, GRUState]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) as `rows.pack` gives it.
            rows: Where the tokens are.
            state: From which to start, in the order of `rows`; None for zeros.

        Returns:
            (directions, tokens, hidden), and the state behind each row's last token.
        """
        dtype = packed.dtype
        if torch.is_autocast_enabled(packed.device.type):
            dtype = torch.get_autocast_dtype(packed.device.type)
        state = self.zero_state(len(rows.order)) if state is None else state
        gated = 2 * self.hidden_size
        with torch.autocast(packed.device.type, enabled=False):
            bias = torch.cat([self.bias[:, :gated] + self.state_bias[:, :gated], self.bias[:, gated:]], 1)
            parts = (bias.to(dtype), packed.to(dtype), self.input_weight.to(dtype))
            gates = torch.stack([linear(states, weight, bias) for bias, states, weight in zip(*parts, strict=True)])
            weights = (self.state_weight.to(dtype), self.state_bias[:, gated:].to(dtype))
            given = (gates, state.hidden.to(dtype), *weights)
            if torch.compiler.is_compiling():
                outputs, hidden = recurrence_in_a_graph(*given, rows.present, rows.restarts)
            else:
                steps = rows.steps if rows.present is None else (rows.shape[0],) * rows.shape[1]
                outputs, hidden = recur(*given, steps, rows.present, rows.restarts)
        return outputs, GRUState(hidden)
