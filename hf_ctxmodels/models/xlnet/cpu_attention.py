"""Attention with relative positions on a CPU: sequence by sequence, each within the processor's cache.

The formula is that of `relative_attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu.dropout import DROPOUT_LEVELS, dropout_mask, inverted_dropout_scale
from hf_ctxmodels.models.xlnet.relative_attention import RelativeBiases

_HIDDEN = -1e30  # added to a score, leaves no probability; finite, so that a row without any key stays a number
_BLOCK = 64  # rows whose position scores are made at a time: fewer distances each, and all in cache


@dataclass(frozen=True)
class SequenceRange:
    """One sequence: its rows among all query rows, and its keys.

    Attributes:
        rows, stop: Its first query row and one past its last.
        keys, keys_stop: Likewise among the keys.
        content: How many of its rows, from the first, stand at positions 0, 1, 2, ...
        origin: Index of the distance between position 0 and the sequence's first key.
        columns: (rows - content, keys) index of the distance between each further row and each key, or None.
        hidden: (rows, keys), added to the scores, or None when every key is visible to every row.
        group: Which table of distances is its own.
    """

    rows: int
    stop: int
    keys: int
    keys_stop: int
    content: int
    origin: int
    columns: Tensor | None = None
    hidden: Tensor | None = None
    group: int = 0


@dataclass(frozen=True)
class SequenceRanges:
    """All sequences of a batch, end to end.

    Attributes:
        pieces: The sequences.
        row_types: (rows, types) one-hot segments in the model's precision, or None for no segment term.
        key_types: (keys, types) likewise.
        blind: (rows,) bool, rows without any visible key; None when there is none.
    """

    pieces: tuple[SequenceRange, ...]
    row_types: Tensor | None = None
    key_types: Tensor | None = None
    blind: Tensor | None = None


def runs_per_sequence(tensor: Tensor) -> bool:
    """Whether attention runs sequence by sequence: on a CPU in single precision, outside of graphs being compiled."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and not torch.compiler.is_compiling()


def one_hot_types(row_types: Tensor | None, key_types: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Segments of any numbering, of the rows and of the keys, -> (rows, types) and (keys, types) one-hot."""
    if row_types is None or key_types is None:
        return None, None
    rows, keys = row_types.flatten(), key_types.flatten()
    kinds, numbers = torch.cat([rows, keys]).unique(return_inverse=True)
    one_hot = F.one_hot(numbers, len(kinds)).float()
    return one_hot[: len(rows)], one_hot[len(rows) :]


def hidden_scores(visible: Tensor) -> Tensor:
    """What is added to scores, 0 at visible keys; in single precision."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, _HIDDEN)


def attend_per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: RelativeBiases,
    pieces: SequenceRanges,
    *,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attention within each sequence, on a CPU in single precision.

    Segments cost no term of their own: with one-hot types t, a query is extended by -(its surplus for another segment)
    times its t, a key by its t, so that their product takes the surplus away where the types are equal. What remains
    differs from the formula by the same number for every key of a row, which a softmax does not notice.

    Args:
        query: (rows, heads, head_dim).
        key, value: (keys, heads, head_dim).
        relative: (groups, distances, heads, head_dim).
        biases: Parameters of the score.
        pieces: The sequences.
        scaling: Factor on the scores.
        dropout: Rate on the probabilities.

    Returns:
        (rows, heads, head_dim), zero where no key is visible.
    """
    by_head = query.transpose(0, 1)
    for_keys = torch.add((biases.content * scaling)[:, None], by_head, alpha=scaling)
    for_distances = torch.add((biases.position * scaling)[:, None], by_head, alpha=scaling)
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if pieces.row_types is not None and pieces.key_types is not None:
        surplus = (biases.segments[1] - biases.segments[0]) * scaling  # (heads, head_dim)
        surplus = by_head @ surplus[..., None] + (biases.segment * surplus).sum(-1)[:, None, None]
        for_keys = torch.cat([for_keys, pieces.row_types * -surplus], -1)
        key = torch.cat([key, pieces.key_types.expand(len(key), -1, -1)], -1)
    context = _PieceAttention.apply(
        for_keys,
        for_distances,
        key,
        value,
        relative.transpose(1, 2).contiguous(),
        pieces,
        dropout,
        torch.is_grad_enabled(),
    )
    return context.transpose(0, 1)


class _PieceAttention(torch.autograd.Function):
    """Softmax of content and position scores times values, one sequence at a time: each fits the processor's cache."""

    @staticmethod
    def forward(
        ctx: Any,
        for_keys: Tensor,
        for_distances: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        pieces: SequenceRanges,
        dropout: float,
        trains: bool,  # within the function gradients are always off
    ) -> Tensor:
        heads, rows, head_dim = for_distances.shape
        context = torch.empty(rows, heads, head_dim).transpose(0, 1)
        ctx.levels = min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)
        ctx.pieces, ctx.kept = pieces, []
        keep = trains and any(ctx.needs_input_grad)
        for piece in pieces.pieces:
            at, keys = slice(piece.rows, piece.stop), slice(piece.keys, piece.keys_stop)
            scores = _position_scores_of(piece, for_distances[:, at], relative[piece.group])
            scores.baddbmm_(for_keys[:, at], key[:, keys].transpose(1, 2))
            probabilities = torch.softmax(scores, -1, out=scores)
            mask = dropout_mask(scores.shape, ctx.levels) if ctx.levels else None
            context[:, at] = torch.bmm(_dropped(probabilities, mask, ctx.levels), value[:, keys])
            if keep:
                ctx.kept.append((probabilities, mask))
        if pieces.blind is not None:
            context[:, pieces.blind] = 0
        if keep:
            ctx.save_for_backward(for_keys, for_distances, key, value, relative, context)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for_keys, for_distances, key, value, relative, context = ctx.saved_tensors
        if ctx.pieces.blind is not None:
            grad = grad.index_fill(1, ctx.pieces.blind.nonzero().squeeze(1), 0)
        grad_for_keys, grad_for_distances = torch.empty_like(for_keys), torch.empty_like(for_distances)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        grad_relative = torch.zeros_like(relative)
        # The gradient of a softmax subtracts each row's mean, which is grad . context whatever the dropout.
        mean = (grad * context).sum(-1, keepdim=True)
        for piece, (probabilities, mask) in zip(ctx.pieces.pieces, ctx.kept, strict=True):
            at, keys = slice(piece.rows, piece.stop), slice(piece.keys, piece.keys_stop)
            dropped = _dropped(probabilities, mask, ctx.levels)
            grad_value[:, keys] = torch.bmm(dropped.transpose(1, 2), grad[:, at])
            grad_scores = torch.bmm(grad[:, at], value[:, keys].transpose(1, 2))
            if mask is not None:
                grad_scores.mul_(mask).mul_(inverted_dropout_scale(ctx.levels))
            grad_scores.sub_(mean[:, at]).mul_(probabilities)
            grad_for_keys[:, at] = torch.bmm(grad_scores, key[:, keys])
            grad_key[:, keys] = torch.bmm(grad_scores.transpose(1, 2), for_keys[:, at])
            _position_gradients(
                piece,
                grad_scores,
                for_distances[:, at],
                relative[piece.group],
                grad_for_distances[:, at],
                grad_relative[piece.group],
            )
        return grad_for_keys, grad_for_distances, grad_key, grad_value, grad_relative, None, None, None


def _dropped(probabilities: Tensor, mask: Tensor | None, levels: int) -> Tensor:
    return probabilities if mask is None else (probabilities * mask).mul_(inverted_dropout_scale(levels))


def _position_scores_of(piece: SequenceRange, query: Tensor, relative: Tensor) -> Tensor:
    """(heads, rows, keys) position scores of one sequence, with what hides its keys.

    Args:
        piece: The sequence.
        query: (heads, rows, head_dim).
        relative: (heads, distances, head_dim).
    """
    heads, rows, _ = query.shape
    keys = piece.keys_stop - piece.keys
    scores = query.new_empty(heads, rows, keys)
    for start in range(0, piece.content, _BLOCK):
        stop = min(start + _BLOCK, piece.content)
        distances = _distances_of(piece, start, stop)
        by_distance = torch.bmm(query[:, start:stop], relative[:, distances].transpose(1, 2))
        scores[:, start:stop] = _shifted(by_distance, keys)
    if piece.columns is not None:
        by_distance = torch.bmm(query[:, piece.content :], relative.transpose(1, 2))
        columns = piece.columns.expand(heads, -1, -1)
        scores[:, piece.content :] = by_distance.gather(-1, columns)
    return scores if piece.hidden is None else scores.add_(piece.hidden)


def _position_gradients(
    piece: SequenceRange, grad: Tensor, query: Tensor, relative: Tensor, grad_query: Tensor, grad_relative: Tensor
) -> None:
    """Write what `_position_scores_of` passes back to its queries, and add what it passes back to the distances."""
    heads, _, keys = grad.shape
    for start in range(0, piece.content, _BLOCK):
        stop = min(start + _BLOCK, piece.content)
        distances = _distances_of(piece, start, stop)
        by_distance = grad.new_zeros(heads, stop - start, keys + stop - start - 1)
        _shifted(by_distance, keys).copy_(grad[:, start:stop])
        grad_query[:, start:stop] = torch.bmm(by_distance, relative[:, distances])
        grad_relative[:, distances].baddbmm_(by_distance.transpose(1, 2), query[:, start:stop])
    if piece.columns is not None:
        rows = slice(piece.content, None)
        by_distance = grad.new_zeros(heads, len(piece.columns), relative.shape[1])
        by_distance.scatter_(-1, piece.columns.expand(heads, -1, -1), grad[:, rows])
        grad_query[:, rows] = torch.bmm(by_distance, relative)
        grad_relative.baddbmm_(by_distance.transpose(1, 2), query[:, rows])


def _distances_of(piece: SequenceRange, start: int, stop: int) -> slice:
    """The distances that content rows start ... stop - 1 have to the keys, farthest first."""
    return slice(piece.origin - stop + 1, piece.origin - start + piece.keys_stop - piece.keys)


def _shifted(by_distance: Tensor, keys: int) -> Tensor:
    """(heads, rows, keys + rows - 1), one column per distance -> a view (heads, rows, keys), one column per key.

    The last row's first key is the farthest: column 0. Each row above starts one column later.
    """
    heads, rows, width = by_distance.shape
    return by_distance.as_strided((heads, rows, keys), (rows * width, width - 1, 1), rows - 1)
