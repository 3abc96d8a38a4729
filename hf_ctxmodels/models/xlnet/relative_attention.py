"""Attention with relative positions (Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5).

The score of query i for key j, before scaling by 1 / sqrt(head_dim), is

    (q_i + u) . k_j  +  (q_i + v) . r(i - j)  +  (q_i + s) . e(same segment or not)

with learned biases u, v, s, and r a projection of the sinusoidal encoding of the distance. `eager_attention` is the
naive reference implementation. `dense_attention` passes the last two terms to torch's SDPA as a bias; it runs on
accelerators and in compiled graphs. `layers.cpu.relative_attention` is the implementation for CPUs.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_ctxmodels.layers.cpu.relative_attention import RelativeBiases

MAX_DENSE_QUERIES = 512
"""Largest number of queries per example for which `dense_attention` computes the scores at once."""


@dataclass(frozen=True)
class AttentionPattern:
    """Distances, visible keys and segments of the queries of a padded batch.

    Attributes:
        distance_offsets: (batch, queries, 1) index of the distance between a query and the first key in the distance
            encodings; the index for key j is larger by j.
        visible: (batch, queries, keys) bool, True at visible keys; None if all keys are visible.
        query_segments, key_segments: (batch, queries) and (batch, keys) segment ids; None to omit the segment term.
    """

    distance_offsets: Tensor
    visible: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None

    def select_queries(self, queries: slice) -> "AttentionPattern":
        """The pattern of a slice of the queries."""
        return replace(
            self,
            distance_offsets=self.distance_offsets[:, queries],
            visible=None if self.visible is None else self.visible[:, queries],
            query_segments=None if self.query_segments is None else self.query_segments[:, queries],
        )

    def differing_segments(self) -> Tensor | None:
        """(batch, 1, queries, keys) bool, True where query and key are in different segments; None without segments."""
        if self.query_segments is None or self.key_segments is None:
            return None
        return (self.query_segments[:, :, None] != self.key_segments[:, None, :])[:, None]


def distance_encodings(distances: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal encodings (distances, width) of integer distances: the sines of all frequencies, then the cosines."""
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
    """Reference implementation: computes the score term by term.

    Args:
        query: (batch, queries, heads, head_dim).
        key, value: (batch, keys, heads, head_dim).
        relative: (batch or 1, distances, heads, head_dim), the projected distance encodings.
        biases: Learned parameters of the score.
        pattern: Distances, visible keys and segments.
        scaling, dropout: Factor applied to the scores, and dropout rate on the probabilities.

    Returns:
        The context (batch, queries, heads, head_dim), zero for queries without a visible key, and the attention
        probabilities (batch, heads, queries, keys).
    """
    content = torch.einsum("bihd,bjhd->bhij", query + biases.content, key)
    scores = (content + _position_scores(query, relative, biases, pattern, key.shape[1])) * scaling
    differs = pattern.differing_segments()
    if differs is not None:
        same_segment, other_segment = torch.einsum("bihd,shd->sbhi", query + biases.segment, biases.segment_embeddings)[
            ..., None
        ]
        scores = scores + torch.where(differs, other_segment, same_segment) * scaling
    if pattern.visible is not None:
        scores = scores.masked_fill(~pattern.visible[:, None], torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if pattern.visible is not None:
        probabilities = probabilities.masked_fill(~pattern.visible[:, None], 0.0)  # queries without a visible key
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
    """Attend by torch's SDPA, with the position and segment terms as additive mask; arguments as in `eager_attention`.

    Batches with more than `MAX_DENSE_QUERIES` queries are computed in blocks and recomputed in the backward pass, so
    that memory grows linearly with the length.
    """

    def attend(query: Tensor, pattern: AttentionPattern) -> Tensor:
        bias = _position_scores(query, relative, biases, pattern, key.shape[1])
        differs = pattern.differing_segments()
        if differs is not None:
            # a softmax is invariant to the term of equal segments, a constant per query: only the difference is added
            direction = biases.segment_embeddings[1] - biases.segment_embeddings[0]
            difference = torch.einsum("bihd,hd->bhi", query + biases.segment, direction)
            bias = bias + difference[..., None] * differs.to(difference.dtype)
        bias = bias * scaling
        if pattern.visible is not None:
            bias = bias.masked_fill(~pattern.visible[:, None], torch.finfo(bias.dtype).min)
        content = (query + biases.content).to(query.dtype)
        content, keys, values = (tensor.transpose(1, 2) for tensor in (content, key, value))
        context = F.scaled_dot_product_attention(
            content, keys, values, attn_mask=bias.to(query.dtype), dropout_p=dropout, scale=scaling
        ).transpose(1, 2)
        if torch.compiler.is_exporting():  # the SDPA kernels, selected at run time, return different strides
            context = context.clone(memory_format=torch.contiguous_format)
        return context if pattern.visible is None else context * pattern.visible.any(-1)[..., None, None]

    num_queries = query.shape[1]
    if torch.compiler.is_compiling() or num_queries <= MAX_DENSE_QUERIES:
        return attend(query, pattern)
    blocks = [slice(start, start + MAX_DENSE_QUERIES) for start in range(0, num_queries, MAX_DENSE_QUERIES)]
    attend_checkpointed = partial(checkpoint, attend, use_reentrant=False)
    return torch.cat([attend_checkpointed(query[:, block], pattern.select_queries(block)) for block in blocks], 1)


def _position_scores(
    query: Tensor, relative: Tensor, biases: RelativeBiases, pattern: AttentionPattern, num_keys: int
) -> Tensor:
    """(batch, heads, queries, keys) position term, gathered by distance from the scores of all distances."""
    scores_by_distance = torch.einsum(
        "bihd,bwhd->bhiw", query + biases.position, relative.expand(query.shape[0], -1, -1, -1)
    )
    indices = pattern.distance_offsets + torch.arange(num_keys, device=query.device)
    return scores_by_distance.gather(-1, indices[:, None].expand(-1, scores_by_distance.shape[1], -1, -1))
