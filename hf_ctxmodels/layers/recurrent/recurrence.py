"""The recurrences of LSTM and GRU layers after the products of the inputs.

One buffer holds the values of all steps. The backward pass visits the steps in reverse, and computes the gradient of
each weight in one product for all steps. On a CPU a step multiplies few rows by large weights, where oneDNN with
prepacked weights is several times faster than torch's BLAS.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.layers.cpu.linear import (
    can_use_onednn_or_bfloat16,
    fast_linear,
    linear,
    matmul_transposed,
    onednn_linear,
    prepack_weight,
)

LSTM_GATES, GRU_GATES = 4, 3
_MIN_PREPACKED_STEPS = 12  # with fewer steps, prepacking a weight costs more than it saves


class StepOptions(NamedTuple):
    """Options of the steps.

    Attributes:
        steps: Number of rows of each step.
        cell_clip, projection_clip: Bounds of absolute values; None for no bound.
        token_mask: (directions, tokens, 1) bool, False at padding, where the state is carried unchanged; None without
            padding.
        restarts: (directions, tokens, 1) bool, True where the state is zeroed before the step; None for no restarts.
    """

    steps: tuple[int, ...]
    cell_clip: float | None = None
    projection_clip: float | None = None
    token_mask: Tensor | None = None
    restarts: Tensor | None = None


def input_gates(layer: Any, packed: Tensor, bias: Tensor) -> Tensor:
    """The contribution of the input to the gates, for all steps.

    Args:
        layer: Has an `input_weight` (directions, gates, input), or instead `input_maps`, a linear layer for each
            direction.
        packed: (directions, tokens, input).
        bias: (directions, gates).

    Returns:
        (directions, tokens, gates).
    """
    layers = getattr(layer, "input_maps", None)
    if layers is not None:
        return torch.stack([linear(module, states) for module, states in zip(layers, packed)]) + bias[:, None]
    weights = layer.input_weight.to(packed.dtype)
    return torch.stack([fast_linear(*arguments) for arguments in zip(packed, weights, bias)])


def computation_dtype(packed: Tensor) -> tuple[torch.dtype, AbstractContextManager[None]]:
    """The dtype of a layer for this input, and a context that disables autocast.

    Without autocast the context does nothing: an exported program cannot be saved with an autocast context in it.
    """
    device = packed.device.type
    if not torch.is_autocast_enabled(device):
        return packed.dtype, nullcontext()
    return torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)


class _StepProduct:
    """Repeated products with the transpose of a weight, (directions, out, in)."""

    def __init__(self, weight: Tensor, num_steps: int) -> None:
        self.weights: Sequence[Tensor] = weight.unbind()
        self.uses_onednn = can_use_onednn_or_bfloat16(weight)
        if self.uses_onednn and num_steps >= _MIN_PREPACKED_STEPS:
            self.weights = [prepack_weight(matrix) for matrix in self.weights]

    def add_to(self, target: Tensor, left: Tensor) -> None:
        """Compute `target += left @ weight.T`, both (directions, rows, ...)."""
        for direction, rows, weight in zip(target, left, self.weights, strict=True):
            if self.uses_onednn and len(rows):
                direction.add_(onednn_linear(rows, weight))
            else:
                direction.addmm_(rows, weight.T)

    def __call__(self, left: Tensor) -> Tensor:
        """(directions, rows, in) -> (directions, rows, out)."""
        pairs = zip(left, self.weights, strict=True)
        if self.uses_onednn and left.shape[1]:
            return torch.stack([onednn_linear(rows, weight) for rows, weight in pairs])
        return torch.stack([rows @ weight.T for rows, weight in pairs])


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """(directions, tokens, m), (directions, tokens, n) -> (directions, m, n)."""
    return torch.stack([matmul_transposed(first.T, second.T) for first, second in zip(left, right, strict=True)])


def _previous_states(initial: Tensor, states: Tensor, options: StepOptions) -> Tensor:
    """(directions, tokens, width) the state before each packed token's step; `initial` at the first step."""
    previous, start = [initial[:, : options.steps[0]]], 0
    for rows, next_rows in pairwise(options.steps):
        previous.append(states[:, start : start + next_rows])
        start += rows
    concatenated = torch.cat(previous, 1)
    return concatenated if options.restarts is None else concatenated * ~options.restarts


# LSTM


class LSTMResult(NamedTuple):
    """The results of all steps of an LSTM, (directions, tokens, ...).

    Attributes:
        gates: The gates after their non-linearities.
        outputs, cells: Hidden and cell state after every step.
        last_hidden, last_cell: (directions, rows, ...) the state after each row's last token.
    """

    gates: Tensor
    outputs: Tensor
    cells: Tensor
    last_hidden: Tensor
    last_cell: Tensor


def lstm_recurrence(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    options: StepOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all steps; returns (directions, tokens, output) outputs, and the last hidden and cell states.

    Args:
        gates: (directions, tokens, 4 * cell) contribution of the input to the gates, with the bias.
        hidden, cell: (directions, rows, ...) the state before the first step.
        state_weight: (directions, 4 * cell, output).
        projection: (directions, output, cell) or None.
        options: Options of the steps.
    """
    is_grad_enabled = torch.is_grad_enabled()  # within the function gradients are always disabled
    return _LSTMRecurrence.apply(gates, hidden, cell, state_weight, projection, options, is_grad_enabled)


class _LSTMRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        cell: Tensor,
        state_weight: Tensor,
        projection: Tensor | None,
        options: StepOptions,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        result = run_lstm(gates.clone() if needs_grad else gates, hidden, cell, state_weight, projection, options)
        if needs_grad:
            ctx.save_for_backward(*result[:3], hidden, cell, state_weight, projection)
            ctx.options = options
        return result.outputs, result.last_hidden, result.last_cell

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last_hidden: Tensor, d_last_cell: Tensor) -> tuple[Tensor | None, ...]:
        gates, outputs, cells, hidden, cell, state_weight, projection = ctx.saved_tensors
        result = LSTMResult(gates, outputs, cells, d_last_hidden, d_last_cell)
        gradients = lstm_gradients(result, hidden, cell, state_weight, projection, ctx.options, d_outputs)
        return (*gradients, None, None)


def run_lstm(
    gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, projection: Tensor | None, options: StepOptions
) -> LSTMResult:
    """The forward pass; arguments as in `lstm_recurrence`. The gates are overwritten in place."""
    directions, tokens, width = gates.shape
    size, num_steps = width // LSTM_GATES, len(options.steps)
    multiply_state = _StepProduct(state_weight, num_steps)
    project = None if projection is None else _StepProduct(projection, num_steps)
    outputs = gates.new_empty(directions, tokens, state_weight.shape[2])
    cells = gates.new_empty(directions, tokens, size)
    last_states: list[tuple[Tensor, Tensor]] = []  # of the rows without further tokens
    start = 0
    for rows in options.steps:
        if rows < hidden.shape[1]:
            last_states.append((hidden[:, rows:], cell[:, rows:]))
            hidden, cell = hidden[:, :rows], cell[:, :rows]
        step = slice(start, start := start + rows)
        if options.restarts is not None:
            continues = ~options.restarts[:, step]
            hidden, cell = hidden * continues, cell * continues
        step_gates, new_hidden, new_cell = gates[:, step], outputs[:, step], cells[:, step]
        multiply_state.add_to(step_gates, hidden)
        in_gate, forget, candidate, out_gate = step_gates.split(size, -1)
        step_gates[..., : 2 * size].sigmoid_()
        candidate.tanh_()
        out_gate.sigmoid_()
        torch.mul(forget, cell, out=new_cell)
        new_cell.addcmul_(in_gate, candidate)
        if options.cell_clip is not None:
            new_cell.clamp_(-options.cell_clip, options.cell_clip)
        unprojected = out_gate * new_cell.tanh()
        new_hidden.copy_(unprojected if project is None else project(unprojected))
        if options.projection_clip is not None:
            new_hidden.clamp_(-options.projection_clip, options.projection_clip)
        if options.token_mask is not None:
            is_token = options.token_mask[:, step]
            new_hidden.copy_(torch.where(is_token, new_hidden, hidden))
            new_cell.copy_(torch.where(is_token, new_cell, cell))
        hidden, cell = new_hidden, new_cell
    last_states.append((hidden, cell))
    last_hidden, last_cell = (torch.cat(states[::-1], 1) for states in zip(*last_states, strict=True))
    return LSTMResult(gates, outputs, cells, last_hidden, last_cell)


def lstm_gradients(
    result: LSTMResult,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    options: StepOptions,
    d_outputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the first five arguments of `lstm_recurrence`.

    Args:
        result: The result of the forward pass, with the gradients of the last states instead of these.
        hidden, cell, state_weight, projection, options: Arguments of the forward pass.
        d_outputs: (directions, tokens, output).
    """
    d_gates, d_pre_clip, d_hidden, d_cell = _run_lstm_backward(
        result, cell, state_weight, projection, options, d_outputs
    )
    d_state_weight = _sum_products(d_gates, _previous_states(hidden, result.outputs, options))
    d_projection = None
    if projection is not None:
        unprojected = result.gates[..., 3 * result.cells.shape[2] :] * result.cells.tanh()
        d_projection = _sum_products(d_pre_clip, unprojected)
    return d_gates, d_hidden, d_cell, d_state_weight, d_projection


def _run_lstm_backward(
    result: LSTMResult,
    first_cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    options: StepOptions,
    d_outputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward pass.

    Returns:
        Gradients of the gates before their non-linearities (directions, tokens, 4 * cell), of the outputs before
        clipping (directions, tokens, output), and of the state before the first step.
    """
    gates, outputs, cells, d_last_hidden, d_last_cell = result
    size, num_steps = cells.shape[2], len(options.steps)
    backpropagate_state = _StepProduct(state_weight.transpose(1, 2), num_steps)
    backpropagate_projection = None if projection is None else _StepProduct(projection.transpose(1, 2), num_steps)
    d_gates, d_pre_clip = torch.empty_like(gates), d_outputs.clone()
    tanh_cells, previous_cells = cells.tanh(), _previous_states(first_cell, cells, options)
    d_hidden, d_cell = d_last_hidden[:, :0], d_last_cell[:, :0]
    stop = gates.shape[1]
    for rows in reversed(options.steps):
        later_rows, step = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > later_rows:  # rows whose last token is in this step
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, later_rows:rows]], 1)
            d_cell = torch.cat([d_cell, d_last_cell[:, later_rows:rows]], 1)
        in_gate, forget, candidate, out_gate = gates[:, step].split(size, -1)
        tanh_cell = tanh_cells[:, step]
        d_output = d_pre_clip[:, step].add_(d_hidden)
        if options.token_mask is not None:
            is_padding = ~options.token_mask[:, step]
            d_carried_hidden, d_carried_cell = d_output * is_padding, d_cell * is_padding
            d_output.masked_fill_(is_padding, 0)
            d_cell = d_cell.masked_fill(is_padding, 0)
        _zero_clipped_(d_output, outputs[:, step], options.projection_clip)
        d_unprojected = d_output if backpropagate_projection is None else backpropagate_projection(d_output)
        d_cell = torch.addcmul(d_cell, d_unprojected * out_gate, 1 - tanh_cell.square())
        _zero_clipped_(d_cell, cells[:, step], options.cell_clip)
        d_in, d_forget, d_candidate, d_out_gate = d_gates[:, step].split(size, -1)
        torch.mul(d_cell * candidate, in_gate - in_gate.square(), out=d_in)
        torch.mul(d_cell * previous_cells[:, step], forget - forget.square(), out=d_forget)
        torch.mul(d_cell * in_gate, 1 - candidate.square(), out=d_candidate)
        torch.mul(d_unprojected * tanh_cell, out_gate - out_gate.square(), out=d_out_gate)
        d_cell, d_hidden = d_cell * forget, backpropagate_state(d_gates[:, step])
        if options.token_mask is not None:
            d_cell, d_hidden = d_cell + d_carried_cell, d_hidden + d_carried_hidden
        if options.restarts is not None:
            continues = ~options.restarts[:, step]
            d_cell, d_hidden = d_cell * continues, d_hidden * continues
        stop -= rows
    return d_gates, d_pre_clip, d_hidden, d_cell


def _zero_clipped_(gradient: Tensor, values: Tensor, clip: float | None) -> None:
    """Zero the gradient of clipped values, in place."""
    if clip is not None:
        gradient.masked_fill_(values.abs() >= clip, 0)


# GRU


class GRUResult(NamedTuple):
    """The results of all steps of a GRU, (directions, tokens, ...).

    Attributes:
        gates: The gates after their non-linearities.
        candidate_terms: The contribution of the state to each candidate.
        outputs: The state after every step.
        last_hidden: (directions, rows, hidden) the state after each row's last token.
    """

    gates: Tensor
    candidate_terms: Tensor
    outputs: Tensor
    last_hidden: Tensor


def gru_recurrence(
    gates: Tensor, hidden: Tensor, state_weight: Tensor, candidate_bias: Tensor, options: StepOptions
) -> tuple[Tensor, Tensor]:
    """Run all steps; returns (directions, tokens, hidden) states, and the last states (directions, rows, hidden).

    Args:
        gates: (directions, tokens, 3 * hidden) contribution of the input to reset gate, update gate and candidate, with
            all biases except the candidate's recurrent bias.
        hidden: (directions, rows, hidden) the states before the first step.
        state_weight: (directions, 3 * hidden, hidden).
        candidate_bias: (directions, hidden) the candidate's recurrent bias, added before the reset gate is applied.
        options: Options of the steps, without clipping.
    """
    is_grad_enabled = torch.is_grad_enabled()  # within the function gradients are always disabled
    return _GRURecurrence.apply(gates, hidden, state_weight, candidate_bias, options, is_grad_enabled)


class _GRURecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        state_weight: Tensor,
        candidate_bias: Tensor,
        options: StepOptions,
        is_grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        result = run_gru(gates.clone() if needs_grad else gates, hidden, state_weight, candidate_bias, options)
        if needs_grad:
            ctx.save_for_backward(*result[:3], hidden, state_weight)
            ctx.options = options
        return result.outputs, result.last_hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last_hidden: Tensor) -> tuple[Tensor | None, ...]:
        gates, candidate_terms, outputs, hidden, state_weight = ctx.saved_tensors
        result = GRUResult(gates, candidate_terms, outputs, d_last_hidden)
        return (*gru_gradients(result, hidden, state_weight, ctx.options, d_outputs), None, None)


def run_gru(
    gates: Tensor, hidden: Tensor, state_weight: Tensor, candidate_bias: Tensor, options: StepOptions
) -> GRUResult:
    """The forward pass; arguments as in `gru_recurrence`. The gates are overwritten in place."""
    size = hidden.shape[2]
    multiply_state = _StepProduct(state_weight, len(options.steps))
    candidate_terms, outputs = (gates.new_empty(*gates.shape[:2], size) for _ in range(2))
    last_states: list[Tensor] = []  # of the rows without further tokens
    start = 0
    for rows in options.steps:
        if rows < hidden.shape[1]:
            last_states.append(hidden[:, rows:])
            hidden = hidden[:, :rows]
        step = slice(start, start := start + rows)
        if options.restarts is not None:
            hidden = hidden * ~options.restarts[:, step]
        step_gates, candidate_term, new_hidden = gates[:, step], candidate_terms[:, step], outputs[:, step]
        state_terms = multiply_state(hidden)
        step_gates[..., : 2 * size].add_(state_terms[..., : 2 * size]).sigmoid_()
        reset, update, candidate = step_gates.split(size, -1)
        torch.add(state_terms[..., 2 * size :], candidate_bias[:, None], out=candidate_term)
        candidate.addcmul_(reset, candidate_term).tanh_()
        torch.lerp(candidate, hidden, update, out=new_hidden)
        if options.token_mask is not None:
            new_hidden.copy_(torch.where(options.token_mask[:, step], new_hidden, hidden))
        hidden = new_hidden
    last_states.append(hidden)
    return GRUResult(gates, candidate_terms, outputs, torch.cat(last_states[::-1], 1))


def gru_gradients(
    result: GRUResult, hidden: Tensor, state_weight: Tensor, options: StepOptions, d_outputs: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the first four arguments of `gru_recurrence`.

    Args:
        result: The result of the forward pass, with the gradient of the last states instead of these.
        hidden, state_weight, options: Arguments of the forward pass.
        d_outputs: (directions, tokens, hidden).
    """
    gates, candidate_terms, outputs, d_last_hidden = result
    size = hidden.shape[2]
    previous = _previous_states(hidden, outputs, options)
    backpropagate_state = _StepProduct(state_weight.transpose(1, 2), len(options.steps))
    d_state_terms = torch.empty_like(gates)  # of the contributions of the state to the gates
    d_candidates = torch.empty_like(outputs)  # of the candidates before their non-linearity
    d_hidden = d_last_hidden[:, :0]
    stop = gates.shape[1]
    for rows in reversed(options.steps):
        later_rows, step = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > later_rows:  # rows whose last token is in this step
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, later_rows:rows]], 1)
        reset, update, candidate = gates[:, step].split(size, -1)
        d_new = d_outputs[:, step] + d_hidden
        d_carried = None
        if options.token_mask is not None:
            is_padding = ~options.token_mask[:, step]
            d_carried = d_new * is_padding
            d_new = d_new.masked_fill(is_padding, 0)
        d_reset, d_update, d_candidate_term = d_state_terms[:, step].split(size, -1)
        d_candidate = d_candidates[:, step]
        torch.mul(d_new * (1 - update), 1 - candidate.square(), out=d_candidate)
        torch.mul(d_candidate * candidate_terms[:, step], reset - reset.square(), out=d_reset)
        torch.mul(d_new * (previous[:, step] - candidate), update - update.square(), out=d_update)
        torch.mul(d_candidate, reset, out=d_candidate_term)
        d_hidden = torch.addcmul(backpropagate_state(d_state_terms[:, step]), d_new, update)
        if d_carried is not None:
            d_hidden = d_hidden + d_carried
        if options.restarts is not None:
            d_hidden = d_hidden * ~options.restarts[:, step]
        stop -= rows
    d_gates = torch.cat([d_state_terms[..., : 2 * size], d_candidates], -1)
    return d_gates, d_hidden, _sum_products(d_state_terms, previous), d_state_terms[..., 2 * size :].sum(1)
