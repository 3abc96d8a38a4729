"""Packed sequences in the order of a recurrence, and bidirectional layers over padded batches."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.host_copies import host_copy, to_device


class StepOptions(NamedTuple):
    """Options of the steps of a recurrence.

    Attributes:
        steps, step_mask, restarts: See `PackedSequences`; `steps` is only empty in a compiled graph.
        cell_clip, projection_clip: Bounds of absolute values in an LSTM; None for no bound.
    """

    steps: tuple[int, ...]
    step_mask: Tensor | None = None
    restarts: Tensor | None = None
    cell_clip: float | None = None
    projection_clip: float | None = None


@dataclass(frozen=True)
class PackedSequences:
    """The tokens of a batch, step by step: the first token of each sequence, the second tokens, and so on.

    Sequences are sorted by length, longest first, so that each step processes the first sequences. The second
    direction visits a sequence from the last token to the first. Several sequences in a row of the batch are packed
    separately.

    Attributes:
        positions: (directions, tokens) index of each packed token in the flattened (rows * length) batch.
        steps: Number of sequences in each step; empty with `step_mask`, where all steps have all rows.
        order: (sequences,) the batch's row (or sequence) of each packed sequence.
        shape: (rows, length) of the batch.
        step_mask: (directions, tokens, 1) bool, False at padding positions, which follow the tokens of each row and do
            not change the state; None without padding positions.
        restarts: With `step_mask` and several sequences in a row, (directions, tokens, 1) bool, True at the first
            token of each sequence except the first of a row, where the state is zeroed; else None.
    """

    positions: Tensor
    steps: tuple[int, ...]
    order: Tensor
    shape: tuple[int, int]
    step_mask: Tensor | None = None
    restarts: Tensor | None = None

    @classmethod
    def build(
        cls, token_mask: Tensor, sequences: Tensor | None = None, directions: int = 2, unpad: bool = True
    ) -> "PackedSequences":
        """Pack the (rows, length) positions where `token_mask` is True, which may be anywhere in a row.

        `sequences` are (rows, length) numbers of the sequence within its row; None for one sequence per row.
        `unpad=False` packs padding positions too, see `with_padding`.
        """
        if not unpad:
            return cls.with_padding(token_mask, sequences, directions)
        (rows, length), device = token_mask.shape, token_mask.device
        positions = host_copy(token_mask).flatten().nonzero()[:, 0]
        keys = positions // length
        if sequences is not None:
            keys = keys * (length + 1) + host_copy(sequences).flatten()[positions]
        _, sequence, lengths = keys.unique(return_inverse=True, return_counts=True)
        rank = torch.arange(len(positions)) - (lengths.cumsum(0) - lengths)[sequence]
        order = lengths.argsort(descending=True, stable=True)
        column = order.argsort()[sequence]
        ranks = [rank, lengths[sequence] - 1 - rank][:directions]
        packed_positions = torch.stack([positions[(step * len(order) + column).argsort()] for step in ranks])
        steps = tuple(torch.bincount(rank).tolist())
        return cls(to_device(packed_positions, device), steps, to_device(order, device), (rows, length))

    @classmethod
    def with_padding(
        cls, token_mask: Tensor, sequences: Tensor | None = None, directions: int = 2
    ) -> "PackedSequences":
        """Pack with padding positions after each row's tokens: slower, for graphs of static shape."""
        rows, length = token_mask.shape
        lengths = token_mask.sum(1)[:, None]
        index = torch.arange(length, device=token_mask.device).expand(rows, -1)
        counts = token_mask.cumsum(1)
        rank = torch.where(token_mask, counts - 1, lengths + index - counts)
        columns = torch.zeros_like(index).scatter(1, rank, index)  # sorted: tokens, then padding positions
        is_token = index < lengths
        reversed_columns = columns.gather(1, torch.where(is_token, lengths - 1 - index, index))
        columns_by_direction = [columns, reversed_columns][:directions]
        order = torch.arange(rows, device=token_mask.device)
        positions = torch.stack([(order[:, None] * length + columns).T.flatten() for columns in columns_by_direction])
        restarts = None
        if sequences is not None:
            # (directions, length, rows)
            numbers = torch.stack([sequences.gather(1, columns).T for columns in columns_by_direction])
            restarts = torch.zeros_like(numbers, dtype=torch.bool)
            restarts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            restarts = restarts.flatten(1)[..., None]
        step_mask = is_token.T.reshape(1, -1, 1).expand(directions, -1, -1)
        return cls(positions, (), order, (rows, length), step_mask, restarts)

    def step_options(self) -> StepOptions:
        """Options of the steps, without clipping."""
        steps = self.steps
        if self.step_mask is not None and not torch.compiler.is_compiling():  # whose length may be symbolic
            steps = (self.shape[0],) * self.shape[1]
        return StepOptions(steps, self.step_mask, self.restarts)

    def select_direction(self, name: Literal["forward", "backward"]) -> "PackedSequences":
        """Only one of two directions."""
        direction = slice(0, 1) if name == "forward" else slice(1, 2)
        step_mask = None if self.step_mask is None else self.step_mask[direction]
        restarts = None if self.restarts is None else self.restarts[direction]
        return replace(self, positions=self.positions[direction], step_mask=step_mask, restarts=restarts)

    def pack(self, states: Tensor) -> Tensor:
        """(rows, length, width) -> (directions, tokens, width)."""
        return states.flatten(0, 1)[self.positions]

    def add_directions(self, packed: Tensor) -> Tensor:
        """(tokens, width) in the order of the first direction -> (directions, tokens, width)."""
        ranks = self.positions.new_empty(self.shape[0] * self.shape[1])
        ranks[self.positions[0]] = torch.arange(len(packed), device=packed.device)
        return packed[ranks[self.positions]]

    def unpack(self, packed: Tensor) -> Tensor:
        """(directions, tokens, width) -> (directions, rows, length, width), zero at padding positions."""
        rows, length = self.shape
        if self.step_mask is not None:
            packed = packed * self.step_mask.to(packed.dtype)
        padded = packed.new_zeros(packed.shape[0], rows * length, packed.shape[2])
        positions = self.positions[..., None].expand_as(packed)
        return padded.scatter(1, positions, packed).unflatten(1, (rows, length))

    def repack(self, padded: Tensor) -> Tensor:
        """(directions, rows, length, width) from `unpack` -> (directions, tokens, width)."""
        positions = self.positions[..., None].expand(-1, -1, padded.shape[-1])
        return padded.flatten(1, 2).gather(1, positions)

    @property
    def sequence_indices(self) -> Tensor:
        """(tokens,) index of each packed token's sequence; the same in both directions."""
        if self.step_mask is not None:
            return torch.arange(self.shape[0], device=self.order.device).repeat(self.shape[1])
        indices = torch.arange(len(self.order), device=self.order.device)
        return torch.cat([indices[:number] for number in self.steps])

    def pack_state(self, state: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """(rows, directions, width) state of a layer in `RecurrentCache` -> (directions, sequences, width)."""
        return tuple(tensor.transpose(0, 1)[:, self.order] for tensor in state)

    def unpack_state(self, state: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The inverse of `pack_state`."""
        inverse = torch.zeros_like(self.order)
        inverse = inverse.scatter(0, self.order, torch.arange(self.order.shape[0], device=self.order.device))
        return tuple(tensor[:, inverse].transpose(0, 1) for tensor in state)


def concat_directions(states: Tensor) -> Tensor:
    """(directions, ..., width) states -> (..., directions * width)."""
    return states[0] if len(states) == 1 else torch.cat([*states], -1)


def run_layer(layer: nn.Module, states: Tensor, packing: PackedSequences) -> Tensor:
    """One bidirectional layer: (batch, length, width) -> (batch, length, 2 * output), zero at padding positions."""
    return concat_directions(packing.unpack(layer(packing.pack(states), packing)[0]))


def run_bidirectional(
    layers: Iterable[nn.Module], embeddings: Tensor, packing: PackedSequences, dropout: nn.Module
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """A stack of bidirectional `LSTM` or `GRU` layers, with dropout on the input of each layer except the first.

    Returns:
        The (batch, length, width) embeddings and each layer's output (batch, length, 2 * width), zero at padding
        positions; and each layer's state after the last token of each sequence, tensors (batch, 2, width).
    """
    states, final_states = [embeddings], []
    for depth, layer in enumerate(layers):
        inputs = dropout(states[-1]) if depth else embeddings
        packed, state = layer(packing.pack(inputs), packing)
        states.append(concat_directions(packing.unpack(packed)))
        final_states.append(packing.unpack_state(state))
    return states, final_states
