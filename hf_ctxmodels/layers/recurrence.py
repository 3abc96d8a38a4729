"""The recurrence of an LSTM: what is left to do step by step when all inputs have been multiplied.

`recurrence_by_steps` is the formula; `recur` gives the same from one buffer for all steps, with a backward that makes
the gradient of each weight in one product for all steps; `recurrence_in_a_graph` is the formula as one operation.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GATES = 4


def recurrence_by_steps(
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
    """The recurrence as it is written down: outputs (directions, tokens, output), and the last hidden states and cells.

    Args:
        gates: (directions, tokens, 4 * cell) what the input gives to the gates, bias included.
        hidden, cell: (directions, rows, ...) the state before the first step.
        state_weight: (directions, 4 * cell, output).
        projection: (directions, output, cell) or None.
        steps: Rows of each step.
        cell_clip, projection_clip: Largest absolute values.
        present: (directions, tokens, 1) bool, where the state changes; None for everywhere.
        restarts: (directions, tokens, 1) bool, before which the state is forgotten; None for nowhere.
    """
    outputs, start = [], 0
    ended: list[tuple[Tensor, Tensor]] = []
    for rows in steps:
        if rows < hidden.shape[1]:
            ended.append((hidden[:, rows:], cell[:, rows:]))
            hidden, cell = hidden[:, :rows], cell[:, :rows]
        if restarts is not None:
            keeps = ~restarts[:, start : start + rows]
            hidden, cell = hidden * keeps, cell * keeps
        values = gates[:, start : start + rows] + hidden @ state_weight.transpose(1, 2)
        in_gate, forget, candidate, out_gate = values.chunk(GATES, -1)
        new_cell = forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh()
        if cell_clip is not None:
            new_cell = new_cell.clamp(-cell_clip, cell_clip)
        new_hidden = out_gate.sigmoid() * new_cell.tanh()
        if projection is not None:
            new_hidden = new_hidden @ projection.transpose(1, 2)
        if projection_clip is not None:
            new_hidden = new_hidden.clamp(-projection_clip, projection_clip)
        if present is not None:
            changes = present[:, start : start + rows]
            new_hidden, new_cell = torch.where(changes, new_hidden, hidden), torch.where(changes, new_cell, cell)
        hidden, cell = new_hidden, new_cell
        outputs.append(hidden)
        start += rows
    ended.append((hidden, cell))
    hidden, cell = (torch.cat(parts[::-1], 1) for parts in zip(*ended, strict=True))
    return torch.cat(outputs, 1), hidden, cell


def _with_all_rows(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden.shape[1]
    steps = (rows,) * (gates.shape[1] // rows)
    return recurrence_by_steps(
        gates, hidden, cell, state_weight, projection, steps, cell_clip, projection_clip, present, restarts
    )


@torch.library.custom_op("hf_ctxmodels::recurrence", mutates_args=())
def recurrence_in_a_graph(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All steps as one operation of a compiled graph, which would otherwise be another one for every length."""
    with torch.no_grad():
        return tuple(
            each.clone()
            for each in _with_all_rows(
                gates, hidden, cell, state_weight, projection, present, restarts, cell_clip, projection_clip
            )
        )


@recurrence_in_a_graph.register_fake
def _shapes(
    gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = gates.new_empty(gates.shape[0], gates.shape[1], state_weight.shape[2])
    return outputs, gates.new_empty(hidden.shape), gates.new_empty(cell.shape)


@torch.library.custom_op("hf_ctxmodels::recurrence_backward", mutates_args=())
def _backward_in_a_graph(
    gradients: list[Tensor],
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> list[Tensor]:
    """Gradients of `recurrence_in_a_graph` in its first four arguments and the projection; computes it once more."""
    given = [gates, hidden, cell, state_weight, *([] if projection is None else [projection])]

    def run(gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        rest = (more[0] if more else None, present, restarts, cell_clip, projection_clip)
        return _with_all_rows(gates, hidden, cell, state_weight, *rest)

    # within an operation autograd records nothing; this differentiates all the same
    differentiate = torch.func.vjp(run, *given)[1]
    return [each.clone() for each in differentiate(tuple(gradients))]


@_backward_in_a_graph.register_fake
def _gradient_shapes(gradients: list[Tensor], *given: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in given[:5] if each is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.clips = inputs[7:]


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    parts = [each.contiguous() for each in gradients]
    found = _backward_in_a_graph(parts, *ctx.saved_tensors, *ctx.clips)
    return (*found, *[None] * (9 - len(found)))


recurrence_in_a_graph.register_autograd(_differentiate, setup_context=_keep)


def recur(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    steps: tuple[int, ...],
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `recurrence_by_steps` gives without `present` and `restarts`."""
    trains = torch.is_grad_enabled()  # within the function gradients are always off
    return _Recurrence.apply(gates, hidden, cell, state_weight, projection, steps, cell_clip, projection_clip, trains)


class _Recurrence(torch.autograd.Function):
    """`recurrence_by_steps` with one buffer for all steps, and a backward of one product for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        cell: Tensor,
        state_weight: Tensor,
        projection: Tensor | None,
        steps: tuple[int, ...],
        cell_clip: float | None,
        projection_clip: float | None,
        trains: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        directions, tokens, width = gates.shape
        size = width // GATES
        trains = trains and any(ctx.needs_input_grad)
        recur = state_weight.transpose(1, 2)
        project = None if projection is None else projection.transpose(1, 2)
        values = gates.clone() if trains else gates  # it becomes the gates after their non-linearities
        outputs = gates.new_empty(directions, tokens, state_weight.shape[2])
        cells = gates.new_empty(directions, tokens, size)
        first_hidden, first_cell = hidden, cell
        ends, end_cells, start = [], [], 0
        for rows in steps:
            if rows < hidden.shape[1]:
                ends.append(hidden[:, rows:])
                end_cells.append(cell[:, rows:])
                hidden, cell = hidden[:, :rows], cell[:, :rows]
            stop = start + rows
            step = values[:, start:stop]
            _add_product(step, hidden, recur)
            in_gate, forget, candidate, out_gate = step.split(size, -1)
            step[..., : 2 * size].sigmoid_()
            candidate.tanh_()
            out_gate.sigmoid_()
            new_cell = cells[:, start:stop]
            torch.mul(forget, cell, out=new_cell)
            new_cell.addcmul_(in_gate, candidate)
            if cell_clip is not None:
                new_cell.clamp_(-cell_clip, cell_clip)
            new_hidden = outputs[:, start:stop]
            if project is None:
                torch.mul(out_gate, new_cell.tanh(), out=new_hidden)
            else:
                torch.bmm(out_gate * new_cell.tanh(), project, out=new_hidden)
            if projection_clip is not None:
                new_hidden.clamp_(-projection_clip, projection_clip)
            hidden, cell, start = new_hidden, new_cell, stop
        last_hidden = torch.cat([hidden, *reversed(ends)], 1)
        last_cell = torch.cat([cell, *reversed(end_cells)], 1)
        if trains:
            ctx.save_for_backward(values, outputs, cells, first_hidden, first_cell, state_weight, projection)
            ctx.steps, ctx.clips = steps, (cell_clip, projection_clip)
        return outputs, last_hidden, last_cell

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last_hidden: Tensor, d_last_cell: Tensor) -> tuple[Tensor | None, ...]:
        values, outputs, cells, first_hidden, _, _, projection = ctx.saved_tensors
        d_values, d_pre, d_hidden, d_cell = _backward_steps(ctx, d_outputs, d_last_hidden, d_last_cell)
        size = cells.shape[2]
        before = _shifted(first_hidden, outputs, ctx.steps)
        d_state_weight = torch.bmm(d_values.transpose(1, 2), before)
        d_projection = None
        if projection is not None:
            out_gate = values[..., 3 * size :]
            d_projection = torch.bmm(d_pre.transpose(1, 2), out_gate * cells.tanh())
        return d_values, d_hidden, d_cell, d_state_weight, d_projection, None, None, None, None


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """`target += left @ right`, batched over the directions, into a part of a larger buffer."""
    for direction in range(len(target)):
        target[direction].addmm_(left[direction], right[direction])


def _shifted(first: Tensor, values: Tensor, steps: tuple[int, ...]) -> Tensor:
    """(directions, tokens, width): what each packed token's row had one step before; `first` at the first step."""
    parts, start = [first[:, : steps[0]]], 0
    for rows, following in pairwise(steps):
        parts.append(values[:, start : start + following])
        start += rows
    return torch.cat(parts, 1)


def _inside(gradient: Tensor, values: Tensor, clip: float | None) -> None:
    """Zero the gradient of what was clipped, in place."""
    if clip is not None:
        gradient.masked_fill_(values.abs() >= clip, 0)


def _backward_steps(
    ctx: Any, d_outputs: Tensor, d_last_hidden: Tensor, d_last_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From the last step to the first.

    Returns:
        Gradients of the gates before their non-linearities (directions, tokens, 4 * cell), of the outputs before
        clipping (directions, tokens, output), and of the state before the first step.
    """
    values, outputs, cells, _, first_cell, state_weight, projection = ctx.saved_tensors
    cell_clip, projection_clip = ctx.clips
    size = cells.shape[2]
    d_values, d_pre = torch.empty_like(values), d_outputs.clone()
    tanh_cells = cells.tanh()
    cells_before = _shifted(first_cell, cells, ctx.steps)
    d_hidden, d_cell = d_last_hidden[:, :0], d_last_cell[:, :0]
    stop = values.shape[1]
    for rows in reversed(ctx.steps):
        start = stop - rows
        if rows > d_hidden.shape[1]:  # rows whose last token this is
            known = d_hidden.shape[1]
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, known:rows]], 1)
            d_cell = torch.cat([d_cell, d_last_cell[:, known:rows]], 1)
        part = slice(start, stop)
        in_gate, forget, candidate, out_gate = values[:, part].split(size, -1)
        tanh_cell = tanh_cells[:, part]
        d_out = d_pre[:, part].add_(d_hidden)
        _inside(d_out, outputs[:, part], projection_clip)
        d_shown = d_out if projection is None else torch.bmm(d_out, projection)
        d_cell = torch.addcmul(d_cell, d_shown * out_gate, 1 - tanh_cell.square())
        _inside(d_cell, cells[:, part], cell_clip)
        d_in, d_forget, d_candidate, d_out_gate = d_values[:, part].split(size, -1)
        torch.mul(d_cell * candidate, in_gate - in_gate.square(), out=d_in)
        torch.mul(d_cell * cells_before[:, part], forget - forget.square(), out=d_forget)
        torch.mul(d_cell * in_gate, 1 - candidate.square(), out=d_candidate)
        torch.mul(d_shown * tanh_cell, out_gate - out_gate.square(), out=d_out_gate)
        d_cell = d_cell * forget
        d_hidden = torch.bmm(d_values[:, part], state_weight)
        stop = start
    return d_values, d_pre, d_hidden, d_cell
