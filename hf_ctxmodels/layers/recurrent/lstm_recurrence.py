"""The recurrence of an LSTM after the input's products.

One buffer holds the values of all steps. The backward pass visits the steps in reverse, and computes the gradient of
each weight in one product for all steps. On a CPU a step can_use_onednn_or_bfloat16 few rows by large weights, where oneDNN with
prepacked weights is several times faster than torch's BLAS.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.layers.cpu.linear import can_use_onednn_or_bfloat16, onednn_linear, prepack_weight, product

GATES = 4
_PREPACKED_FROM = 12  # steps; with fewer, the copy of a weight costs more than it saves


class Rules(NamedTuple):
    """Parameters of the steps.

    Attributes:
        steps: Number of rows of each step.
        cell_clip, projection_clip: Bounds of absolute values; None for no bound.
        present: (directions, tokens, 1) bool, False where the state is carried unchanged; None for no such tokens.
        restarts: (directions, tokens, 1) bool, True where the state is zeroed before the step; None for no such tokens.
    """

    steps: tuple[int, ...]
    cell_clip: float | None
    projection_clip: float | None
    present: Tensor | None
    restarts: Tensor | None


class _Ran(NamedTuple):
    """The results of the steps, (directions, tokens, ...).

    Attributes:
        values: The gates after their non-linearities.
        outputs, cells: Hidden and cell state after every step.
        last_hidden, last_cell: (directions, rows, ...) the state after each row's last token.
    """

    values: Tensor
    outputs: Tensor
    cells: Tensor
    last_hidden: Tensor
    last_cell: Tensor


class StepProduct:
    """Repeated products with the transpose of a weight, (directions, out, in)."""

    def __init__(self, weight: Tensor, times: int) -> None:
        self.weights: Sequence[Tensor] = weight.unbind()
        self.by_onednn = can_use_onednn_or_bfloat16(weight)
        if self.by_onednn and times >= _PREPACKED_FROM:
            self.weights = [prepack_weight(each) for each in self.weights]

    def add_to(self, target: Tensor, left: Tensor) -> None:
        """`target += left @ weight.T`, both (directions, rows, ...)."""
        for part, rows, weight in zip(target, left, self.weights, strict=True):
            if self.by_onednn and len(rows):
                part.add_(onednn_linear(rows, weight))
            else:
                part.addmm_(rows, weight.T)

    def __call__(self, left: Tensor) -> Tensor:
        """(directions, rows, in) -> (directions, rows, out)."""
        pairs = zip(left, self.weights, strict=True)
        if self.by_onednn and left.shape[1]:
            return torch.stack([onednn_linear(rows, weight) for rows, weight in pairs])
        return torch.stack([rows @ weight.T for rows, weight in pairs])


def recur(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    steps: tuple[int, ...],
    cell_clip: float | None,
    projection_clip: float | None,
    present: Tensor | None = None,
    restarts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All steps: outputs (directions, tokens, output), and the last hidden states and cells.

    Args:
        gates: (directions, tokens, 4 * cell) the input's terms of the gates, bias included.
        hidden, cell: (directions, rows, ...) the state before the first step.
        state_weight: (directions, 4 * cell, output).
        projection: (directions, output, cell) or None.
        steps, cell_clip, projection_clip, present, restarts: See `Rules`.
    """
    rules = Rules(steps, cell_clip, projection_clip, present, restarts)
    trains = torch.is_grad_enabled()  # within the function gradients are always off
    return _Recurrence.apply(gates, hidden, cell, state_weight, projection, rules, trains)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        cell: Tensor,
        state_weight: Tensor,
        projection: Tensor | None,
        rules: Rules,
        trains: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        trains = trains and any(ctx.needs_input_grad)
        ran = run_lstm(gates.clone() if trains else gates, hidden, cell, state_weight, projection, rules)
        if trains:
            ctx.save_for_backward(ran.values, ran.outputs, ran.cells, hidden, cell, state_weight, projection)
            ctx.rules = rules
        return ran.outputs, ran.last_hidden, ran.last_cell

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last_hidden: Tensor, d_last_cell: Tensor) -> tuple[Tensor | None, ...]:
        values, outputs, cells, hidden, cell, state_weight, projection = ctx.saved_tensors
        ran = _Ran(values, outputs, cells, d_last_hidden, d_last_cell)
        found = lstm_gradients(ran, hidden, cell, state_weight, projection, ctx.rules, d_outputs)
        return (*found, None, None)


def run_lstm(
    values: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, projection: Tensor | None, rules: Rules
) -> _Ran:
    """The forward pass. `values` are the gates of `recur`, changed in place to those of `_Ran`."""
    directions, tokens, width = values.shape
    size, times = width // GATES, len(rules.steps)
    recurs = StepProduct(state_weight, times)
    projects = None if projection is None else StepProduct(projection, times)
    outputs = values.new_empty(directions, tokens, state_weight.shape[2])
    cells = values.new_empty(directions, tokens, size)
    ended: list[tuple[Tensor, Tensor]] = []
    start = 0
    for rows in rules.steps:
        if rows < hidden.shape[1]:
            ended.append((hidden[:, rows:], cell[:, rows:]))
            hidden, cell = hidden[:, :rows], cell[:, :rows]
        part = slice(start, start := start + rows)
        if rules.restarts is not None:
            keeps = ~rules.restarts[:, part]
            hidden, cell = hidden * keeps, cell * keeps
        step, new_hidden, new_cell = values[:, part], outputs[:, part], cells[:, part]
        recurs.add_to(step, hidden)
        in_gate, forget, candidate, out_gate = step.split(size, -1)
        step[..., : 2 * size].sigmoid_()
        candidate.tanh_()
        out_gate.sigmoid_()
        torch.mul(forget, cell, out=new_cell)
        new_cell.addcmul_(in_gate, candidate)
        if rules.cell_clip is not None:
            new_cell.clamp_(-rules.cell_clip, rules.cell_clip)
        shown = out_gate * new_cell.tanh()
        new_hidden.copy_(shown if projects is None else projects(shown))
        if rules.projection_clip is not None:
            new_hidden.clamp_(-rules.projection_clip, rules.projection_clip)
        if rules.present is not None:
            changes = rules.present[:, part]
            new_hidden.copy_(torch.where(changes, new_hidden, hidden))
            new_cell.copy_(torch.where(changes, new_cell, cell))
        hidden, cell = new_hidden, new_cell
    ended.append((hidden, cell))
    last_hidden, last_cell = (torch.cat(parts[::-1], 1) for parts in zip(*ended, strict=True))
    return _Ran(values, outputs, cells, last_hidden, last_cell)


def lstm_gradients(
    ran: _Ran,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    rules: Rules,
    d_outputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the first five arguments of `recur`.

    Args:
        ran: The results of the steps, with the gradients of the last states in their place.
        hidden, cell, state_weight, projection, rules: Arguments of the forward pass.
        d_outputs: (directions, tokens, output).
    """
    d_values, d_pre, d_hidden, d_cell = _run_back(ran, cell, state_weight, projection, rules, d_outputs)
    before = previous_states(hidden, ran.outputs, rules)
    d_state_weight = summed_products(d_values, before)
    d_projection = None
    if projection is not None:
        d_projection = summed_products(d_pre, ran.values[..., 3 * ran.cells.shape[2] :] * ran.cells.tanh())
    return d_values, d_hidden, d_cell, d_state_weight, d_projection


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """(directions, tokens, m), (directions, tokens, n) -> (directions, m, n)."""
    return torch.stack([product(first.T, second.T) for first, second in zip(left, right, strict=True)])


def previous_states(first: Tensor, values: Tensor, rules: Rules) -> Tensor:
    """(directions, tokens, width): the value before each packed token's step; `first` at the first step."""
    parts, start = [first[:, : rules.steps[0]]], 0
    for rows, following in pairwise(rules.steps):
        parts.append(values[:, start : start + following])
        start += rows
    before = torch.cat(parts, 1)
    return before if rules.restarts is None else before * ~rules.restarts


def _inside(gradient: Tensor, values: Tensor, clip: float | None) -> None:
    """Zero the gradient of clipped values, in place."""
    if clip is not None:
        gradient.masked_fill_(values.abs() >= clip, 0)


def _run_back(
    ran: _Ran, first_cell: Tensor, state_weight: Tensor, projection: Tensor | None, rules: Rules, d_outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward pass.

    Returns:
        Gradients of the gates before their non-linearities (directions, tokens, 4 * cell), of the outputs before
        clipping (directions, tokens, output), and of the state before the first step.
    """
    values, outputs, cells, d_last_hidden, d_last_cell = ran
    size, times = cells.shape[2], len(rules.steps)
    to_hidden = StepProduct(state_weight.transpose(1, 2), times)
    to_shown = None if projection is None else StepProduct(projection.transpose(1, 2), times)
    d_values, d_pre = torch.empty_like(values), d_outputs.clone()
    tanh_cells, cells_before = cells.tanh(), previous_states(first_cell, cells, rules)
    d_hidden, d_cell = d_last_hidden[:, :0], d_last_cell[:, :0]
    stop = values.shape[1]
    for rows in reversed(rules.steps):
        known, part = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > known:  # rows that end at this step
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, known:rows]], 1)
            d_cell = torch.cat([d_cell, d_last_cell[:, known:rows]], 1)
        in_gate, forget, candidate, out_gate = values[:, part].split(size, -1)
        tanh_cell = tanh_cells[:, part]
        d_out = d_pre[:, part].add_(d_hidden)
        if rules.present is not None:
            stays = ~rules.present[:, part]
            d_kept_hidden, d_kept_cell = d_out * stays, d_cell * stays
            d_out.masked_fill_(stays, 0)
            d_cell = d_cell.masked_fill(stays, 0)
        _inside(d_out, outputs[:, part], rules.projection_clip)
        d_shown = d_out if to_shown is None else to_shown(d_out)
        d_cell = torch.addcmul(d_cell, d_shown * out_gate, 1 - tanh_cell.square())
        _inside(d_cell, cells[:, part], rules.cell_clip)
        d_in, d_forget, d_candidate, d_out_gate = d_values[:, part].split(size, -1)
        torch.mul(d_cell * candidate, in_gate - in_gate.square(), out=d_in)
        torch.mul(d_cell * cells_before[:, part], forget - forget.square(), out=d_forget)
        torch.mul(d_cell * in_gate, 1 - candidate.square(), out=d_candidate)
        torch.mul(d_shown * tanh_cell, out_gate - out_gate.square(), out=d_out_gate)
        d_cell, d_hidden = d_cell * forget, to_hidden(d_values[:, part])
        if rules.present is not None:
            d_cell, d_hidden = d_cell + d_kept_cell, d_hidden + d_kept_hidden
        if rules.restarts is not None:
            keeps = ~rules.restarts[:, part]
            d_cell, d_hidden = d_cell * keeps, d_hidden * keeps
        stop -= rows
    return d_values, d_pre, d_hidden, d_cell
