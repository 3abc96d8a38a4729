"""LSTM layers over packed rows: both directions in one loop, with projection, clipping and a state that is carried on.

`PackedRows` says where the tokens of a batch are. A layer multiplies all its inputs in one product; the recurrence that
follows goes only over those rows that have a token left, so padding is neither computed nor enters a state.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.dropout import dropout
from hf_ctxmodels.layers.linear import linear
from hf_ctxmodels.layers.recurrent.lstm_recurrence import GATES, recur, recurrence_in_a_graph


class State(NamedTuple):
    """What a layer remembers of every row.

    Attributes:
        hidden: (directions, rows, output) its last output.
        cell: (directions, rows, cell).
    """

    hidden: Tensor
    cell: Tensor


AnyState = TypeVar("AnyState", bound=tuple[Tensor, ...])
"""A named tuple of tensors (directions, rows, ...): what some kind of layer remembers."""


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

    def backwards(self) -> "PackedRows":
        """The second of two directions by itself."""
        present, restarts = (None if each is None else each[1:] for each in (self.present, self.restarts))
        return replace(self, places=self.places[1:], present=present, restarts=restarts)

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

    @property
    def numbers(self) -> Tensor:
        """(tokens,) of each packed token, the packed row it belongs to; the same in both directions."""
        if self.present is not None:
            return torch.arange(self.shape[0], device=self.order.device).repeat(self.shape[1])
        every = torch.arange(len(self.order), device=self.order.device)
        return torch.cat([every[:number] for number in self.steps])

    def sorted(self, state: AnyState) -> AnyState:
        """A state of the batch's rows, as a layer takes it."""
        return type(state)(*(part[:, self.order] for part in state))

    def unsorted(self, state: AnyState) -> AnyState:
        """A layer's state, in the order of the batch's rows."""
        back = self.order.argsort()
        return type(state)(*(part[:, back] for part in state))


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
        state_bias: Have a second bias beside the input's, as `torch.nn.LSTM` has.
        weight_dropout: Of the weights from step to step, one mask for a whole forward pass (Merity et al. 2017, arXiv
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
        """Gates so that what comes in keeps its variance; the forget gate starts at one (Jozefowicz et al. 2015)."""
        for weight in (self.input_weight, self.state_weight):
            init.normal_(weight, std=(2 / (self.cell_size + weight.shape[2])) ** 0.5)
        if self.projection is not None:
            init.normal_(self.projection, std=(2 / (self.cell_size + self.output_size)) ** 0.5)
        if not getattr(self.bias, "_is_hf_initialized", False):
            init.zeros_(self.bias)
            init.ones_(self.bias[:, self.cell_size : 2 * self.cell_size])
        if self.state_bias is not None:
            init.zeros_(self.state_bias)

    def zero_state(self, rows: int) -> State:
        """A state that remembers nothing."""
        directions = len(self.bias)
        hidden = self.bias.new_zeros(directions, rows, self.output_size)
        return State(hidden, self.bias.new_zeros(directions, rows, self.cell_size))

    def forward(
        self, packed: Tensor, rows: PackedRows, state: State | None = None, truncation: int | None = None
    ) -> tuple[Tensor, State]:
        """Run over all steps.

        Args:
            packed: (directions, tokens, input) as `rows.pack` gives it.
            rows: Where the tokens are.
            state: From which to start, in the order of `rows`; None for zeros.
            truncation: Steps after which the state goes on without its gradient; None for never, as in a compiled
                graph.

        Returns:
            (directions, tokens, output), and the state behind each row's last token.
        """
        dtype = packed.dtype
        if torch.is_autocast_enabled(packed.device.type):
            dtype = torch.get_autocast_dtype(packed.device.type)
        state = self.zero_state(len(rows.order)) if state is None else state
        with torch.autocast(packed.device.type, enabled=False):
            state_weight = dropout(self.state_weight, self.weight_dropout, self.training).to(dtype)
            projection = None if self.projection is None else self.projection.to(dtype)
            bias = self.bias if self.state_bias is None else self.bias + self.state_bias
            parts = (bias.to(dtype), packed.to(dtype), self.input_weight.to(dtype))
            gates = torch.stack([linear(states, weight, bias) for bias, states, weight in zip(*parts)])
            state = State(state.hidden.to(dtype), state.cell.to(dtype))
            if not torch.compiler.is_compiling():
                return self._recur(gates, state, state_weight, projection, rows, truncation)
            given = (gates, state.hidden, state.cell, state_weight, projection, rows.present, rows.restarts)
            outputs, hidden, cell = recurrence_in_a_graph(*given, self.cell_clip, self.projection_clip)
        return outputs, State(hidden, cell)

    def _recur(
        self,
        gates: Tensor,
        state: State,
        state_weight: Tensor,
        projection: Tensor | None,
        rows: PackedRows,
        truncation: int | None,
    ) -> tuple[Tensor, State]:
        """The recurrence in stretches of `truncation` steps, between which no gradient passes."""
        clips = (self.cell_clip, self.projection_clip)
        steps = rows.steps if rows.present is None else (rows.shape[0],) * rows.shape[1]
        size = truncation if truncation is not None and torch.is_grad_enabled() else max(1, len(steps))
        outputs, ended, start = [], [], 0
        for first in range(0, len(steps), size):
            stretch = steps[first : first + size]
            part = slice(start, start + sum(stretch))
            going = state
            if first:
                ended.append(State(*(each[:, stretch[0] :] for each in state)))
                going = State(*(each[:, : stretch[0]].detach() for each in state))
            given = (gates[:, part], going.hidden, going.cell, state_weight, projection, stretch, *clips)
            where = (None if mask is None else mask[:, part] for mask in (rows.present, rows.restarts))
            out, hidden, cell = recur(*given, *where)
            outputs.append(out)
            state, start = State(hidden, cell), part.stop
        if len(outputs) == 1:
            return outputs[0], state
        return torch.cat(outputs, 1), State(*(torch.cat(parts, 1) for parts in zip(state, *reversed(ended))))
