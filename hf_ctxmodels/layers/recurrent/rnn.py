"""LSTM and GRU layers over packed sequences, with one or two directions.

A layer multiplies all its inputs in one product; the recurrence then runs on the sequences with remaining tokens, so
that padding positions are not computed.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, StepOptions
from hf_ctxmodels.layers.recurrent.recurrence import (
    GRU_GATES,
    LSTM_GATES,
    State,
    computation_dtype,
    gru_gradients,
    input_gates,
    lstm_gradients,
    run_by_torch,
    run_gru,
    run_lstm,
    scan_gru,
    scan_lstm,
    uses_cudnn,
)


class LSTM(nn.Module):
    """One layer of long short-term memory, with one direction or two independent ones.

    The gates are input, forget, cell and output, in this order (Hochreiter & Schmidhuber 1997; the projection: Sak et
    al. 2014, arXiv 1402.1128). At every step:

        cell = clip(sigmoid(forget) * cell + sigmoid(input) * tanh(candidate))
        output = clip(P (sigmoid(output) * tanh(cell)))

    Args:
        projection_size: Width of the output; None for `cell_size`, without a projection.
        cell_clip, projection_clip: Bounds of the absolute value of the cell state and the output; None for no bound.
        state_bias: Add a second bias, of the recurrent weights, as in `torch.nn.LSTM`.
        weight_dropout: Dropout rate of the recurrent weights, one mask per forward pass (Merity et al. 2017, arXiv
            1708.02182, section 2).
        joint_initialization: Initialize with the variance of Glorot & Bengio 2010 for one matrix from the input and the
            state to all gates, as in TensorFlow's `LSTMCell`; by default for each gate, and separately for the input
            and the state.
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
        joint_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.weight_dropout, self.joint_initialization = weight_dropout, joint_initialization
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
        """Weights from normal distributions, and a forget bias of one (Jozefowicz et al. 2015)."""
        weights = self.input_weight, self.state_weight
        joint_size = LSTM_GATES * self.cell_size + sum(weight.shape[2] for weight in weights)
        for weight in weights:
            size = joint_size if self.joint_initialization else self.cell_size + weight.shape[2]
            init.normal_(weight, std=(2 / size) ** 0.5)
        if self.projection is not None:
            init.normal_(self.projection, std=(2 / (self.cell_size + self.output_size)) ** 0.5)
        if not getattr(self.bias, "_is_hf_initialized", False):
            init.zeros_(self.bias)
            init.ones_(self.bias[:, self.cell_size : 2 * self.cell_size])
        if self.state_bias is not None:
            init.zeros_(self.state_bias)

    def zero_state(self, num_sequences: int) -> State:
        """The initial state, zeros."""
        return tuple(
            self.bias.new_zeros(len(self.bias), num_sequences, size) for size in (self.output_size, self.cell_size)
        )

    def forward(
        self,
        packed: Tensor,
        packing: PackedSequences,
        state: Iterable[Tensor] | None = None,
        truncation: int | None = None,
    ) -> tuple[Tensor, State]:
        """Run over all steps; returns (directions, tokens, output), and the state after the last token of each
        sequence.

        Args:
            packed: (directions, tokens, input) from `packing.pack`.
            state: Initial hidden and cell state from `packing.pack_state`; None for zeros.
            truncation: Number of steps after which the state is detached; None, or a compiled graph, never detaches it.
        """
        dtype, without_autocast = computation_dtype(packed)
        hidden, cell = self.zero_state(packing.order.shape[0]) if state is None else state
        with without_autocast:
            state_weight = dropout(self.state_weight, self.weight_dropout, self.training)
            state = hidden.to(dtype), cell.to(dtype)
            options = packing.step_options()._replace(cell_clip=self.cell_clip, projection_clip=self.projection_clip)
            if uses_cudnn(self, packed, options):
                state_bias = torch.zeros_like(self.bias) if self.state_bias is None else self.state_bias
                weights = [self.input_weight, state_weight, self.bias, state_bias]
                weights += [] if self.projection is None else [self.projection]
                inputs, run = packed.to(dtype), partial(run_by_torch, "lstm", weights)
            else:
                bias = self.bias if self.state_bias is None else self.bias + self.state_bias
                inputs = input_gates(self, packed.to(dtype), bias.to(dtype))
                projection = None if self.projection is None else self.projection.to(dtype)
                run = partial(_run_lstm, state_weight.to(dtype), projection)
            if truncation is None or truncation >= len(options.steps) or not torch.is_grad_enabled():
                outputs, *state = run(options, inputs, *state)
                return outputs, tuple(state)
            last_states: list[Iterable[Tensor]] = []  # of sequences without further tokens
            segment_outputs, start = [], 0
            for first_step in range(0, len(options.steps), truncation):
                steps = options.steps[first_step : first_step + truncation]
                segment = slice(start, start + sum(steps))
                if first_step:
                    rows = steps[0]
                    last_states.append([tensor[:, rows:] for tensor in state])
                    state = [tensor[:, :rows].detach() for tensor in state]
                step_mask, restarts = (
                    None if mask is None else mask[:, segment] for mask in (options.step_mask, options.restarts)
                )
                segment_options = options._replace(steps=steps, step_mask=step_mask, restarts=restarts)
                output, *state = run(segment_options, inputs[:, segment], *state)
                segment_outputs.append(output)
                start = segment.stop
        last_states.append(state)
        last_state = tuple(torch.cat(states[::-1], 1) for states in zip(*last_states, strict=True))
        return torch.cat(segment_outputs, 1), last_state


def bidirectional_lstms(input_size: int, hidden_size: int, num_layers: int) -> nn.ModuleList:
    """The layers of a stack for `run_bidirectional`, with outputs of twice the `hidden_size`."""
    widths = [input_size, *[2 * hidden_size] * num_layers]
    return nn.ModuleList(LSTM(width, hidden_size) for width in widths[:num_layers])


class GRU(nn.Module):
    """One layer of gated recurrent units, with one direction or two independent ones.

    The gates are reset, update and candidate, in this order (Cho et al. 2014, arXiv 1406.1078; the reset gate comes
    after the product, as in `torch.nn.GRU`). At every step:

        candidate = tanh(W x + b + sigmoid(reset) * (U h + c))
        h = (1 - sigmoid(update)) * candidate + sigmoid(update) * h
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
        """Uniform within 1 / sqrt(hidden), the initialization of `torch.nn.GRU`."""
        for parameter in self.parameters():
            init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def zero_state(self, num_sequences: int) -> State:
        """The initial state, zeros."""
        return (self.bias.new_zeros(len(self.bias), num_sequences, self.hidden_size),)

    def forward(
        self, packed: Tensor, packing: PackedSequences, state: Iterable[Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """Run over all steps, see `LSTM.forward`."""
        dtype, without_autocast = computation_dtype(packed)
        (hidden,) = self.zero_state(packing.order.shape[0]) if state is None else state
        gated, options = 2 * self.hidden_size, packing.step_options()
        with without_autocast:
            if uses_cudnn(self, packed, options):
                weights = [self.input_weight, self.state_weight, self.bias, self.state_bias]
                outputs, hidden = run_by_torch("gru", weights, options, packed.to(dtype), hidden.to(dtype))
                return outputs, (hidden,)
            bias = torch.cat([self.bias[:, :gated] + self.state_bias[:, :gated], self.bias[:, gated:]], 1)
            gates = input_gates(self, packed.to(dtype), bias.to(dtype))
            hidden, state_weight = hidden.to(dtype), self.state_weight.to(dtype)
            candidate_bias = self.state_bias[:, gated:].to(dtype)
            outputs, hidden = run_recurrence("gru", options, gates, hidden, state_weight, candidate_bias)
        return outputs, (hidden,)


def _run_lstm(
    state_weight: Tensor, projection: Tensor | None, options: StepOptions, gates: Tensor, *state: Tensor
) -> tuple[Tensor, ...]:
    return run_recurrence("lstm", options, gates, *state, state_weight, projection)


def run_recurrence(name: Literal["lstm", "gru"], options: StepOptions, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Run all steps; returns (directions, tokens, output) outputs, and the last states (directions, rows, ...).

    Args:
        inputs: Of "lstm": the contribution of the input to the gates with the bias, (directions, tokens, 4 * cell);
            hidden and cell state before the first step, (directions, rows, ...); the recurrent weight (directions,
            4 * cell, output); and the projection (directions, output, cell) or None. Of "gru": the contribution of the
            input to the gates, (directions, tokens, 3 * hidden), with all biases except the candidate's recurrent one;
            the state; the recurrent weight; and the candidate's recurrent bias (directions, hidden).
    """
    if not torch.compiler.is_compiling():
        return _Recurrence.apply(name, options, torch.is_grad_enabled(), *inputs)
    if torch.compiler.is_exporting():
        return (scan_lstm if name == "lstm" else scan_gru)(options, *inputs)  # type: ignore[arg-type]
    # imported here: defining operators takes torch tens of milliseconds
    from hf_ctxmodels.layers.recurrent.custom_ops import RECURRENCE_OPERATORS

    clips = options.cell_clip, options.projection_clip
    return RECURRENCE_OPERATORS[name](*inputs, options.step_mask, options.restarts, *clips)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        options: StepOptions,
        is_grad_enabled: bool,  # an argument, since gradients are always disabled within the function
        gates: Tensor,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        run = run_lstm if name == "lstm" else run_gru
        values, last_states = run(options, gates.clone() if needs_grad else gates, *inputs)  # type: ignore[arg-type]
        if needs_grad:
            ctx.save_for_backward(*values, *inputs)
            ctx.name, ctx.options = name, options
        return values[1], *last_states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compute = lstm_gradients if ctx.name == "lstm" else gru_gradients
        values, inputs = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        return None, None, None, *compute(ctx.options, values, gradients, *inputs)
