"""LSTM layers over packed rows, with one or two directions, projection, clipping and an initial state.

A layer multiplies all its inputs in one product; the recurrence then runs on rows with remaining tokens, so padding
positions are not computed.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.recurrent.inputs import multiply_inputs
from hf_ctxmodels.layers.recurrent.lstm_recurrence import GATES, recur
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.precision import precision_of
from hf_ctxmodels.layers.recurrent.scan import scan_lstm


class LSTMState(NamedTuple):
    """The state of a layer.

    Attributes:
        hidden: (directions, rows, output) hidden state: the last output.
        cell: (directions, rows, cell) cell state.
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
        gates = GATES * cell_size
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

    def zero_state(self, rows: int) -> LSTMState:
        """The initial state, zeros."""
        directions = len(self.bias)
        hidden = self.bias.new_zeros(directions, rows, self.output_size)
        return LSTMState(hidden, self.bias.new_zeros(directions, rows, self.cell_size))

    def forward(
        self,
        packed: Tensor,
        rows: PackedSequences,
        state: Iterable[Tensor] | None = None,
        truncation: int | None = None,
    ) -> tuple[Tensor, LSTMState]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) from `rows.pack`.
            rows: The batch's tokens.
            state: Initial hidden and cell state from `rows.pack_state`; None for zeros.
            truncation: Number of steps after which the state is detached; None, or a compiled graph, never detaches it.

        Returns:
            (directions, tokens, output), and the state after each row's last token.
        """
        dtype, outside_autocast = precision_of(packed)
        hidden, cell = self.zero_state(rows.order.shape[0]) if state is None else state
        with outside_autocast:
            state_weight = dropout(self.state_weight, self.weight_dropout, self.training).to(dtype)
            projection = None if self.projection is None else self.projection.to(dtype)
            bias = self.bias if self.state_bias is None else self.bias + self.state_bias
            gates = multiply_inputs(self, packed.to(dtype), bias.to(dtype))
            start = LSTMState(hidden.to(dtype), cell.to(dtype))
            if not torch.compiler.is_compiling():
                return self._recur(gates, start, state_weight, projection, rows, truncation)
            given = (gates, *start, state_weight, projection, rows.present, rows.restarts)
            if torch.compiler.is_exporting():
                recurrence: Any = scan_lstm
            else:
                from hf_ctxmodels.layers.recurrent.custom_ops import lstm_custom_op as recurrence
            outputs, hidden, cell = recurrence(*given, self.cell_clip, self.projection_clip)
        return outputs, LSTMState(hidden, cell)

    def _recur(
        self,
        gates: Tensor,
        state: LSTMState,
        state_weight: Tensor,
        projection: Tensor | None,
        rows: PackedSequences,
        truncation: int | None,
    ) -> tuple[Tensor, LSTMState]:
        """The recurrence in segments of `truncation` steps without gradients between them."""
        clips = (self.cell_clip, self.projection_clip)
        steps = rows.steps if rows.present is None else (rows.shape[0],) * rows.shape[1]
        size = truncation if truncation is not None and torch.is_grad_enabled() else max(1, len(steps))
        outputs, ended, start = [], [], 0
        for first in range(0, len(steps), size):
            stretch = steps[first : first + size]
            part = slice(start, start + sum(stretch))
            if first:
                ended.append(LSTMState(*(each[:, stretch[0] :] for each in state)))
                state = LSTMState(*(each[:, : stretch[0]].detach() for each in state))
            given = (gates[:, part], *state, state_weight, projection, stretch, *clips)
            masks = (None if mask is None else mask[:, part] for mask in (rows.present, rows.restarts))
            out, hidden, cell = recur(*given, *masks)
            outputs.append(out)
            state, start = LSTMState(hidden, cell), part.stop
        if len(outputs) == 1:
            return outputs[0], state
        return torch.cat(outputs, 1), LSTMState(*(torch.cat(parts, 1) for parts in zip(state, *reversed(ended))))
