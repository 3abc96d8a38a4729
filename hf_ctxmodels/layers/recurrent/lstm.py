"""LSTM layers over packed sequences, with one or two directions, projection, clipping and an initial state.

A layer multiplies all its inputs in one product; the recurrence then runs on the sequences with remaining tokens, so
that padding positions are not computed.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.recurrence import (
    LSTM_GATES,
    StepOptions,
    computation_dtype,
    input_gates,
    lstm_recurrence,
)
from hf_ctxmodels.layers.recurrent.scan import scan_lstm


class LSTMState(NamedTuple):
    """The state of a layer.

    Attributes:
        hidden: (directions, sequences, output) hidden state: the last output.
        cell: (directions, sequences, cell) cell state.
    """

    hidden: Tensor
    cell: Tensor


class LSTM(nn.Module):
    """One layer of long short-term memory, with one direction or two independent ones.

    The gates are input, forget, cell and output, in this order (Hochreiter & Schmidhuber 1997; the projection: Sak et
    al. 2014, arXiv 1402.1128). At every step:

        cell = clip(sigmoid(forget) * cell + sigmoid(input) * tanh(candidate))
        output = clip(P (sigmoid(output) * tanh(cell)))

    Args:
        input_size: Width of the input.
        cell_size: Width of the cell state.
        projection_size: Width of the output; None for `cell_size`, without a projection.
        cell_clip, projection_clip: Bounds of the absolute value of the cell state and the output; None for no bound.
        directions: 1 or 2.
        state_bias: Add a second bias, of the recurrent weights, as in `torch.nn.LSTM`.
        weight_dropout: Dropout rate of the recurrent weights, one mask per forward pass (Merity et al. 2017, arXiv
            1708.02182, section 2).
    """

    initializes_itself = True

    def __init__(
        self,
        input_size: int,
        cell_size: int,
        *,
        projection_size: int | None = None,
        cell_clip: float | None = None,
        projection_clip: float | None = None,
        directions: int = 2,
        state_bias: bool = False,
        weight_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight_dropout = weight_dropout
        self.cell_size, self.output_size = cell_size, projection_size or cell_size
        self.cell_clip, self.projection_clip = cell_clip, projection_clip
        gates = LSTM_GATES * cell_size
        self.input_weight = nn.Parameter(torch.empty(directions, gates, input_size))
        self.state_weight = nn.Parameter(torch.empty(directions, gates, self.output_size))
        self.bias = nn.Parameter(torch.empty(directions, gates))
        self.state_bias = nn.Parameter(torch.empty(directions, gates)) if state_bias else None
        self.projection = (
            None if projection_size is None else nn.Parameter(torch.empty(directions, projection_size, cell_size))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Variance-preserving weights, and a forget bias of one (Jozefowicz et al. 2015)."""
        for weight in (self.input_weight, self.state_weight):
            init.normal_(weight, std=(2 / (self.cell_size + weight.shape[2])) ** 0.5)
        if self.projection is not None:
            init.normal_(self.projection, std=(2 / (self.cell_size + self.output_size)) ** 0.5)
        if not getattr(self.bias, "_is_hf_initialized", False):
            init.zeros_(self.bias)
            init.ones_(self.bias[:, self.cell_size : 2 * self.cell_size])
        if self.state_bias is not None:
            init.zeros_(self.state_bias)

    def zero_state(self, num_sequences: int) -> LSTMState:
        """The initial state, zeros."""
        directions = len(self.bias)
        hidden = self.bias.new_zeros(directions, num_sequences, self.output_size)
        return LSTMState(hidden, self.bias.new_zeros(directions, num_sequences, self.cell_size))

    def forward(
        self,
        packed: Tensor,
        packing: PackedSequences,
        state: Iterable[Tensor] | None = None,
        truncation: int | None = None,
    ) -> tuple[Tensor, LSTMState]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) from `packing.pack`.
            packing: The tokens of the batch.
            state: Initial hidden and cell state from `packing.pack_state`; None for zeros.
            truncation: Number of steps after which the state is detached; None, or a compiled graph, never detaches it.

        Returns:
            (directions, tokens, output), and the state after the last token of each sequence.
        """
        dtype, without_autocast = computation_dtype(packed)
        hidden, cell = self.zero_state(packing.order.shape[0]) if state is None else state
        with without_autocast:
            state_weight = dropout(self.state_weight, self.weight_dropout, self.training).to(dtype)
            projection = None if self.projection is None else self.projection.to(dtype)
            bias = self.bias if self.state_bias is None else self.bias + self.state_bias
            gates = input_gates(self, packed.to(dtype), bias.to(dtype))
            initial = LSTMState(hidden.to(dtype), cell.to(dtype))
            if not torch.compiler.is_compiling():
                return self._run_truncated(gates, initial, state_weight, projection, packing, truncation)
            if torch.compiler.is_exporting():
                recurrence: Any = scan_lstm
            else:
                from hf_ctxmodels.layers.recurrent.custom_ops import lstm_custom_op as recurrence
            outputs, hidden, cell = recurrence(
                gates,
                *initial,
                state_weight,
                projection,
                packing.token_mask,
                packing.restarts,
                self.cell_clip,
                self.projection_clip,
            )
        return outputs, LSTMState(hidden, cell)

    def _run_truncated(
        self,
        gates: Tensor,
        state: LSTMState,
        state_weight: Tensor,
        projection: Tensor | None,
        packing: PackedSequences,
        truncation: int | None,
    ) -> tuple[Tensor, LSTMState]:
        """The recurrence in segments of `truncation` steps without gradients between them."""
        steps = packing.steps if packing.token_mask is None else (packing.shape[0],) * packing.shape[1]
        size = truncation if truncation is not None and torch.is_grad_enabled() else max(1, len(steps))
        outputs, last_states, start = [], [], 0
        for first_step in range(0, len(steps), size):
            segment_steps = steps[first_step : first_step + size]
            segment = slice(start, start + sum(segment_steps))
            if first_step:
                rows = segment_steps[0]
                last_states.append(LSTMState(state.hidden[:, rows:], state.cell[:, rows:]))
                state = LSTMState(state.hidden[:, :rows].detach(), state.cell[:, :rows].detach())
            options = StepOptions(
                segment_steps,
                self.cell_clip,
                self.projection_clip,
                token_mask=None if packing.token_mask is None else packing.token_mask[:, segment],
                restarts=None if packing.restarts is None else packing.restarts[:, segment],
            )
            output, hidden, cell = lstm_recurrence(gates[:, segment], *state, state_weight, projection, options)
            outputs.append(output)
            state, start = LSTMState(hidden, cell), segment.stop
        if len(outputs) == 1:
            return outputs[0], state
        return torch.cat(outputs, 1), LSTMState(
            *(torch.cat(states, 1) for states in zip(state, *reversed(last_states)))
        )
