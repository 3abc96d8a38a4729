"""LSTM layers over packed rows: both directions in one loop, with projection, clipping and a state that is carried on.

`PackedRows` says where the tokens of a batch are. A layer multiplies all its inputs in one product, then goes step by
step over those rows that have a token left, so padding is neither computed nor enters a state. The backward pass goes
over the steps once more, and makes the gradient of each weight in one product for all steps.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

_GATES = 4


class State(NamedTuple):
    """What a layer remembers of every row.

    Attributes:
        hidden: (directions, rows, output) its last output.
        cell: (directions, rows, cell).
    """

    hidden: Tensor
    cell: Tensor


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch, step by step: the first token of every row, the second of those that have one, and so on.

    Rows are in the order of their lengths, longest first, so those that still have a token stand in front. The second
    direction reads every row from its last token to its first. Several sequences in a row of the batch are rows of
    their own here.

    Attributes:
        places: (directions, tokens) of each packed token among the batch's (rows * length) positions.
        steps: number of rows in each step; empty with `present`, where it is always that of all rows.
        order: (rows,) the row (or sequence) of the batch that each packed row is.
        shape: (rows, length) of the batch.
        present: None where padding is left out. Else it is behind each row's tokens, and this, (directions, tokens, 1)
            bool, is False there: the state stays as it is.
        restarts: With `present` and several sequences in a row: (directions, tokens, 1) bool, where one begins behind
            another, so that the state is zero.
    """

    places: Tensor
    steps: tuple[int, ...]
    order: Tensor
    shape: tuple[int, int]
    present: Tensor | None = None
    restarts: Tensor | None = None

    @classmethod
    def build(cls, tokens: Tensor, sequences: Tensor | None = None, directions: int = 2) -> "PackedRows":
        """Without padding.

        Args:
            tokens: (rows, length) bool, where there is a token; padding may stand anywhere.
            sequences: (rows, length) number of the sequence within its row; None for one in each.
            directions: 1 or 2.
        """
        rows, length = tokens.shape
        places = tokens.flatten().nonzero()[:, 0]
        numbers = places // length
        if sequences is not None:
            numbers = numbers * (length + 1) + sequences.flatten()[places]
        _, number, lengths = numbers.unique(return_inverse=True, return_counts=True)
        rank = torch.arange(len(places), device=places.device) - (lengths.cumsum(0) - lengths)[number]
        order = lengths.argsort(descending=True, stable=True)
        column = order.argsort()[number]
        ranks = [rank, lengths[number] - 1 - rank][:directions]
        both = torch.stack([places[(each * len(order) + column).argsort()] for each in ranks])
        return cls(both, tuple(torch.bincount(rank).tolist()), order, (rows, length))

    @classmethod
    def with_padding(cls, tokens: Tensor, sequences: Tensor | None = None, directions: int = 2) -> "PackedRows":
        """As many steps for each row as there are columns, whatever the values: the slow way, and that of graphs."""
        rows, length = tokens.shape
        lengths = tokens.sum(1)[:, None]
        columns = torch.argsort((~tokens).to(torch.uint8), dim=1, stable=True)
        number = torch.arange(length, device=tokens.device).expand(rows, -1)
        present = number < lengths
        both = [columns, columns.gather(1, torch.where(present, lengths - 1 - number, number))][:directions]
        order = torch.arange(rows, device=tokens.device)
        places = torch.stack([(order[:, None] * length + each).T.flatten() for each in both])
        restarts = None
        if sequences is not None:
            numbers = torch.stack([sequences.gather(1, each).T for each in both])  # (directions, length, rows)
            restarts = torch.zeros_like(numbers, dtype=torch.bool)
            restarts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            restarts = restarts.flatten(1)[..., None]
        present = present.T.reshape(1, -1, 1).expand(directions, -1, -1)
        return cls(places, (), order, (rows, length), present, restarts)

    def pack(self, states: Tensor) -> Tensor:
        """(rows, length, width) -> (directions, tokens, width)."""
        return states.flatten(0, 1)[self.places]

    def turned(self, packed: Tensor) -> Tensor:
        """(tokens, width) in the order of the first direction -> (directions, tokens, width)."""
        ranks = self.places.new_empty(self.shape[0] * self.shape[1])
        ranks[self.places[0]] = torch.arange(len(packed), device=packed.device)
        return packed[ranks[self.places]]

    def unpack(self, packed: Tensor) -> Tensor:
        """(directions, tokens, width) -> (directions, rows, length, width), zero at padding."""
        rows, length = self.shape
        if self.present is not None:
            packed = packed * self.present.to(packed.dtype)
        padded = packed.new_zeros(packed.shape[0], rows * length, packed.shape[2])
        places = self.places[..., None].expand_as(packed)
        return padded.scatter(1, places, packed).unflatten(1, (rows, length))

    def sorted(self, state: State) -> State:
        """A state of the batch's rows, as a layer takes it."""
        return State(state.hidden[:, self.order], state.cell[:, self.order])

    def unsorted(self, state: State) -> State:
        """A layer's state, in the order of the batch's rows."""
        back = self.order.argsort()
        return State(state.hidden[:, back], state.cell[:, back])


class LSTM(nn.Module):
    """One layer of a long short-term memory, in one direction or two that do not see each other.

    Of the gates input, forget, cell and output, in this order, of every step (Hochreiter & Schmidhuber 1997; the
    projection: Sak et al. 2014, arXiv 1402.1128):

        cell = clip(sigmoid(forget) * cell + sigmoid(input) * tanh(candidate))
        output = clip(P (sigmoid(output) * tanh(cell)))

    Args:
        input_size: Width of the input.
        cell_size: Width of the cell.
        projection_size: Width of the output; None for that of the cell, without projection.
        cell_clip, projection_clip: Largest absolute value of the cell and of the output; None for no limit.
        directions: 1 or 2.
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
    ) -> None:
        super().__init__()
        self.cell_size, self.output_size = cell_size, projection_size or cell_size
        self.cell_clip, self.projection_clip = cell_clip, projection_clip
        gates = _GATES * cell_size
        self.input_weight = nn.Parameter(torch.empty(directions, gates, input_size))
        self.state_weight = nn.Parameter(torch.empty(directions, gates, self.output_size))
        self.bias = nn.Parameter(torch.empty(directions, gates))
        self.projection = (
            None if projection_size is None else nn.Parameter(torch.empty(directions, projection_size, cell_size))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gates so that what comes in keeps its variance; the forget gate starts at one (Jozefowicz et al. 2015)."""
        for weight in (self.input_weight, self.state_weight):
            init.normal_(weight, std=(2 / (self.cell_size + weight.shape[2])) ** 0.5)
        if self.projection is not None:
            init.normal_(self.projection, std=(2 / (self.cell_size + self.output_size)) ** 0.5)
        if not getattr(self.bias, "_is_hf_initialized", False):
            init.zeros_(self.bias)
            init.ones_(self.bias[:, self.cell_size : 2 * self.cell_size])

    def zero_state(self, rows: int) -> State:
        """A state that remembers nothing."""
        directions = len(self.bias)
        hidden = self.bias.new_zeros(directions, rows, self.output_size)
        return State(hidden, self.bias.new_zeros(directions, rows, self.cell_size))

    def forward(self, packed: Tensor, rows: PackedRows, state: State | None = None) -> tuple[Tensor, State]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) as `rows.pack` gives it.
            rows: Where the tokens are.
            state: From which to start, in the order of `rows`; None for zeros.

        Returns:
            (directions, tokens, output), and the state behind each row's last token.
        """
        dtype = packed.dtype
        if torch.is_autocast_enabled(packed.device.type):
            dtype = torch.get_autocast_dtype(packed.device.type)
        state = self.zero_state(len(rows.order)) if state is None else state
        with torch.autocast(packed.device.type, enabled=False):
            weights = [None if each is None else each.to(dtype) for each in (self.state_weight, self.projection)]
            parts = (self.bias.to(dtype), packed.to(dtype), self.input_weight.to(dtype))
            gates = torch.stack([F.linear(states, weight, bias) for bias, states, weight in zip(*parts)])
            arguments = (gates, state.hidden.to(dtype), state.cell.to(dtype), *weights)
            clips = (self.cell_clip, self.projection_clip)
            if rows.present is None:
                outputs, hidden, cell = _Recurrence.apply(*arguments, rows.steps, *clips, torch.is_grad_enabled())
            elif torch.compiler.is_compiling():
                outputs, hidden, cell = _in_a_graph(*arguments, rows.present, rows.restarts, *clips)
            else:
                steps = (rows.shape[0],) * rows.shape[1]
                outputs, hidden, cell = recurrence_by_steps(*arguments, steps, *clips, rows.present, rows.restarts)
        return outputs, State(hidden, cell)


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
        in_gate, forget, candidate, out_gate = values.chunk(_GATES, -1)
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
def _in_a_graph(
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


@_in_a_graph.register_fake
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
    """Gradients of the first four arguments of `_in_a_graph`, and of the projection; it is computed once more."""
    given = [gates, hidden, cell, state_weight, *([] if projection is None else [projection])]
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in given]
        outputs = _with_all_rows(
            *given[:4], given[4] if len(given) > 4 else None, present, restarts, cell_clip, projection_clip
        )
        return [each.contiguous() for each in torch.autograd.grad(outputs, given, gradients)]


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


_in_a_graph.register_autograd(_differentiate, setup_context=_keep)


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
        trains: bool,  # asked for outside: within the function gradients are always off
    ) -> tuple[Tensor, Tensor, Tensor]:
        directions, tokens, width = gates.shape
        size = width // _GATES
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
