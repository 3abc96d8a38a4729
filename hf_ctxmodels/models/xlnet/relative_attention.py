"""Attention with relative positions (Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5), computed three ways.

The score of query i for key j is, before the scaling by 1 / sqrt(head_dim),

    (q_i + u) . k_j  +  (q_i + v) . r(i - j)  +  (q_i + s) . e(same segment or not)

with learned biases u, v, s, and r a projection of the sinusoid of the distance. `eager_attention` writes this down and
is the oracle of the other two. `dense_attention` hands the last two terms to torch's SDPA as a bias: for accelerators
and for graphs being compiled. `relative_pieces.attend_per_sequence` works sequence by sequence in cache, for CPUs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DENSE_ROWS = 512
"""Most rows of a batch row whose scores `dense_attention` makes at a time."""


class RelativeBiases(NamedTuple):
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
class AttentionPattern:
    """Positions and visible keys of the rows of a padded batch.

    Attributes:
        columns: (batch, rows, 1) index of the distance between a row and the first key; that of key j is j more.
        visible: (batch, rows, keys) bool, True at visible keys; None when every key is visible to every row.
        row_types: (batch, rows) segments, or None for no segment term.
        key_types: (batch, keys) likewise.
    """

    columns: Tensor
    visible: Tensor | None
    row_types: Tensor | None
    key_types: Tensor | None

    def of_rows(self, rows: slice) -> "AttentionPattern":
        """The same for some of the rows."""
        visible = None if self.visible is None else self.visible[:, rows]
        row_types = None if self.row_types is None else self.row_types[:, rows]
        return AttentionPattern(self.columns[:, rows], visible, row_types, self.key_types)


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
    biases: RelativeBiases,
    pattern: AttentionPattern,
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
        pattern: Positions and visible keys of the rows.
        scaling: Factor on the scores.
        dropout: Rate on the probabilities.

    Returns:
        (batch, rows, heads, head_dim) context, zero where no key is visible, and the (batch, heads, rows, keys)
        probabilities.
    """
    content = torch.einsum("bihd,bjhd->bhij", query + biases.content, key)
    scores = (content + _position_scores(query, relative, biases, pattern, key.shape[1])) * scaling
    if pattern.row_types is not None and pattern.key_types is not None:
        same, other = torch.einsum("bihd,shd->sbhi", query + biases.segment, biases.segments)[..., None]
        differs = (pattern.row_types[:, :, None] != pattern.key_types[:, None, :])[:, None]
        scores = scores + torch.where(differs, other, same) * scaling
    if pattern.visible is not None:
        scores = scores.masked_fill(~pattern.visible[:, None], torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if pattern.visible is not None:
        probabilities = probabilities.masked_fill(~pattern.visible[:, None], 0.0)  # a row without any visible key
    probabilities = F.dropout(probabilities, dropout)
    return torch.einsum("bhij,bjhd->bihd", probabilities, value), probabilities


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: RelativeBiases,
    pattern: AttentionPattern,
    *,
    scaling: float,
    dropout: float,
) -> Tensor:
    """torch's SDPA with the position and segment terms as its additive mask; arguments as in `eager_attention`.

    The terms never exist for more than some rows at a time: rows beyond that are computed block by block, and anew for
    the backward pass, so that memory grows with the length and not with its square.
    """
    rows = query.shape[1]
    if torch.compiler.is_compiling() or rows <= DENSE_ROWS:
        return _dense_rows(query, key, value, relative, biases, pattern, scaling, dropout)
    blocks = [slice(start, start + DENSE_ROWS) for start in range(0, rows, DENSE_ROWS)]
    contexts = [
        checkpoint(
            *(_dense_rows, query[:, block], key, value, relative, biases, pattern.of_rows(block), scaling, dropout),
            use_reentrant=False,
        )
        for block in blocks
    ]
    return torch.cat(contexts, 1)


def _dense_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: RelativeBiases,
    pattern: AttentionPattern,
    scaling: float,
    dropout: float,
) -> Tensor:
    """`dense_attention` of rows that are few enough.

    The segment term of equal segments is the same for every key of a row, which a softmax does not notice: only the
    difference to it is added, where segments differ.
    """
    bias = _position_scores(query, relative, biases, pattern, key.shape[1])
    if pattern.row_types is not None and pattern.key_types is not None:
        surplus = torch.einsum("bihd,hd->bhi", query + biases.segment, biases.segments[1] - biases.segments[0])
        differs = (pattern.row_types[:, :, None] != pattern.key_types[:, None, :])[:, None]
        bias = bias + surplus[..., None] * differs.to(surplus.dtype)
    bias = bias * scaling
    if pattern.visible is not None:
        bias = bias.masked_fill(~pattern.visible[:, None], torch.finfo(bias.dtype).min)
    content = (query + biases.content).to(query.dtype)
    query, key, value = (tensor.transpose(1, 2) for tensor in (content, key, value))
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.to(query.dtype), dropout_p=dropout, scale=scaling
    ).transpose(1, 2)
    if torch.compiler.is_exporting():  # the kernels, of which one is chosen later, differ in the strides they return
        context = context.clone(memory_format=torch.contiguous_format)
    if pattern.visible is not None:
        context = context * pattern.visible.any(-1)[..., None, None]
    return context


def _position_scores(
    query: Tensor, relative: Tensor, biases: RelativeBiases, pattern: AttentionPattern, keys: int
) -> Tensor:
    """(batch, heads, rows, keys): the second term, looked up by distance from the scores of all distances."""
    every = torch.einsum("bihd,bwhd->bhiw", query + biases.position, relative.expand(query.shape[0], -1, -1, -1))
    columns = pattern.columns + torch.arange(keys, device=query.device)
    return every.gather(-1, columns[:, None].expand(-1, every.shape[1], -1, -1))
