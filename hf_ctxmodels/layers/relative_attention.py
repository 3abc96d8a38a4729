"""Attention with relative positions (Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5), computed three ways.

The score of query i for key j is, before the scaling by 1 / sqrt(head_dim),

    (q_i + u) . k_j  +  (q_i + v) . r(i - j)  +  (q_i + s) . e(same segment or not)

with learned biases u, v, s, and r a projection of the sinusoid of the distance. `eager_attention` writes this down and
is the oracle of the other two. `dense_attention` hands the last two terms to torch's SDPA as a bias: for accelerators
and for graphs being compiled. `attend_pieces` works sequence by sequence in cache, for CPUs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.dropout import DROPOUT_LEVELS, byte_mask

_HIDDEN = -1e30  # added to a score, leaves no probability; finite, so that a row without any key stays a number
_BLOCK = 64  # rows whose position scores are made at a time: fewer distances each, and all in cache


class Biases(NamedTuple):
    """Learned parameters of the score, (heads, head_dim) each.

    Attributes:
        content: u, added to queries that meet keys.
        position: v, added to queries that meet distances.
        segment: s, added to queries that meet segments.
        segments: (2, heads, head_dim), e of a key in the same segment and of one in another.
    """

    content: Tensor
    position: Tensor
    segment: Tensor
    segments: Tensor


@dataclass(frozen=True)
class Places:
    """Where the rows of a padded batch stand and what they see.

    Attributes:
        columns: (batch, rows, 1) index of the distance between a row and the first key; that of key j is j more.
        visible: (batch, rows, keys) bool, or None when every row sees every key.
        row_types: (batch, rows) segments, or None for no segment term.
        key_types: (batch, keys) likewise.
    """

    columns: Tensor
    visible: Tensor | None
    row_types: Tensor | None
    key_types: Tensor | None

    def of_rows(self, rows: slice) -> "Places":
        """The same for some of the rows."""
        visible = None if self.visible is None else self.visible[:, rows]
        row_types = None if self.row_types is None else self.row_types[:, rows]
        return Places(self.columns[:, rows], visible, row_types, self.key_types)


def distance_encodings(distances: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoids of (distances,) integers, (distances, width): sines of all frequencies, then cosines."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=distances.device).float() / width)
    angles = distances.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: Biases,
    places: Places,
    *,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The formula above, term by term.

    Args:
        query: (batch, rows, heads, head_dim).
        key, value: (batch, keys, heads, head_dim).
        relative: (batch or 1, distances, heads, head_dim), the projected encodings of distances.
        biases: Parameters of the score.
        places: Where the rows stand.
        scaling: Factor on the scores.
        dropout: Rate on the probabilities.

    Returns:
        (batch, rows, heads, head_dim) context, zero where a row sees no key, and the (batch, heads, rows, keys)
        probabilities.
    """
    content = torch.einsum("bihd,bjhd->bhij", query + biases.content, key)
    scores = (content + _position_scores(query, relative, biases, places, key.shape[1])) * scaling
    if places.row_types is not None and places.key_types is not None:
        same, other = torch.einsum("bihd,shd->sbhi", query + biases.segment, biases.segments)[..., None]
        differs = (places.row_types[:, :, None] != places.key_types[:, None, :])[:, None]
        scores = scores + torch.where(differs, other, same) * scaling
    if places.visible is not None:
        scores = scores.masked_fill(~places.visible[:, None], torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if places.visible is not None:
        probabilities = probabilities.masked_fill(~places.visible[:, None], 0.0)  # a row that sees nothing
    probabilities = F.dropout(probabilities, dropout)
    return torch.einsum("bhij,bjhd->bihd", probabilities, value), probabilities


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: Biases,
    places: Places,
    *,
    scaling: float,
    dropout: float,
) -> Tensor:
    """torch's SDPA with the position and segment terms as its additive mask; arguments as in `eager_attention`.

    The segment term of equal segments is the same for every key of a row, which a softmax does not notice: only the
    difference to it is added, where segments differ.
    """
    bias = _position_scores(query, relative, biases, places, key.shape[1])
    if places.row_types is not None and places.key_types is not None:
        surplus = torch.einsum("bihd,hd->bhi", query + biases.segment, biases.segments[1] - biases.segments[0])
        differs = (places.row_types[:, :, None] != places.key_types[:, None, :])[:, None]
        bias = bias + surplus[..., None] * differs.to(surplus.dtype)
    bias = bias * scaling
    if places.visible is not None:
        bias = bias.masked_fill(~places.visible[:, None], torch.finfo(bias.dtype).min)
    content = (query + biases.content).to(query.dtype)
    query, key, value = (tensor.transpose(1, 2) for tensor in (content, key, value))
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.to(query.dtype), dropout_p=dropout, scale=scaling
    ).transpose(1, 2)
    if places.visible is not None:
        context = context * places.visible.any(-1)[..., None, None]
    return context


def _position_scores(query: Tensor, relative: Tensor, biases: Biases, places: Places, keys: int) -> Tensor:
    """(batch, heads, rows, keys): the second term, looked up by distance from the scores of all distances."""
    every = torch.einsum("bihd,bwhd->bhiw", query + biases.position, relative.expand(query.shape[0], -1, -1, -1))
    columns = places.columns + torch.arange(keys, device=query.device)
    return every.gather(-1, columns[:, None].expand(-1, every.shape[1], -1, -1))


@dataclass(frozen=True)
class Piece:
    """One sequence: its rows among all query rows, and its keys.

    Attributes:
        rows, stop: Its first query row and the one behind its last.
        keys, keys_stop: Likewise among the keys.
        content: How many of its rows, from the first, stand at positions 0, 1, 2, ...
        origin: Index of the distance between position 0 and the sequence's first key.
        columns: (rows - content, keys) index of the distance between each further row and each key, or None.
        hidden: (rows, keys), added to the scores, or None when every row sees every key.
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
class Pieces:
    """All sequences of a batch, end to end.

    Attributes:
        pieces: The sequences.
        row_types: (rows, types) one-hot segments in the model's precision, or None for no segment term.
        key_types: (keys, types) likewise.
        blind: (rows,) bool, rows that see no key; None when there is none.
    """

    pieces: tuple[Piece, ...]
    row_types: Tensor | None = None
    key_types: Tensor | None = None
    blind: Tensor | None = None


def hidden_scores(visible: Tensor) -> Tensor:
    """What is added to scores, 0 at visible keys; in single precision."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, _HIDDEN)


def attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: Biases,
    pieces: Pieces,
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
        (rows, heads, head_dim), zero where a row sees no key.
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
        pieces: Pieces,
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
            mask = byte_mask(scores.shape, ctx.levels) if ctx.levels else None
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
                grad_scores.mul_(mask).mul_(_scale(ctx.levels))
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
    return probabilities if mask is None else (probabilities * mask).mul_(_scale(levels))


def _scale(levels: int) -> float:
    return DROPOUT_LEVELS / (DROPOUT_LEVELS - levels)


def _position_scores_of(piece: Piece, query: Tensor, relative: Tensor) -> Tensor:
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
    piece: Piece, grad: Tensor, query: Tensor, relative: Tensor, grad_query: Tensor, grad_relative: Tensor
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


def _distances_of(piece: Piece, start: int, stop: int) -> slice:
    """The distances that content rows start ... stop - 1 have to the keys, farthest first."""
    return slice(piece.origin - stop + 1, piece.origin - start + piece.keys_stop - piece.keys)


def _shifted(by_distance: Tensor, keys: int) -> Tensor:
    """(heads, rows, keys + rows - 1), one column per distance -> a view (heads, rows, keys), one column per key.

    The last row's first key is the farthest: column 0. Each row above starts one column later.
    """
    heads, rows, width = by_distance.shape
    return by_distance.as_strided((heads, rows, keys), (rows * width, width - 1, 1), rows - 1)
