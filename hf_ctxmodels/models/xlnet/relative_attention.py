"""Attention with relative positions (Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5).

The score of query i for key j, before scaling by 1 / sqrt(head_dim), is

    (q_i + u) . k_j  +  (q_i + v) . r(i - j)  +  (q_i + s) . e(same segment or not)

with learned biases u, v, s, and r a projection of the sinusoidal encoding of the distance. `eager_attention` is the
naive reference implementation. `dense_attention` passes the last two terms to torch's SDPA as a bias; it runs on
accelerators and in compiled graphs. `flex_attention` adds them in the kernel of torch's FlexAttention.
`layers.cpu.relative_attention` is the implementation for CPUs.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.masking_utils import flex_attention_mask

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.relative_attention import RelativeBiases

MAX_DENSE_QUERIES = 512
"""Largest number of queries per example for which `dense_attention` computes the scores at once, on a CPU."""
_MAX_DENSE_QUERIES_ON_GPU = 1024
"""On a GPU, so that pretraining with 512 tokens and their targets recomputes nothing: of 32 examples with 12 heads, 600
queries and 900 keys, the scores in half precision are 415 MB."""


@dataclass(frozen=True)
class AttentionPattern:
    """Distances, visible keys and segments of the queries of a padded batch.

    Attributes:
        distance_offsets: (batch, queries, 1) index of the distance between a query and the first key in the distance
            encodings; the index for key j is larger by j.
        visible: (batch, queries, keys) bool, True at visible keys; None if all keys are visible.
        query_segments, key_segments: (batch, queries) and (batch, keys) segment ids; None to omit the segment term.
        block_mask: The visible keys for `flex_attention`; None if all keys are visible, or for other implementations.
    """

    distance_offsets: Tensor
    visible: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    block_mask: BlockMask | None = None

    def select_queries(self, queries: slice) -> "AttentionPattern":
        """The pattern of a slice of the queries."""
        selected = replace(
            self,
            distance_offsets=self.distance_offsets[:, queries],
            visible=None if self.visible is None else self.visible[:, queries],
            query_segments=None if self.query_segments is None else self.query_segments[:, queries],
        )
        return selected if self.block_mask is None else selected.with_block_mask()

    def with_block_mask(self) -> "AttentionPattern":
        """The pattern with its `block_mask`, computed once for all layers."""
        if (visible := self.visible) is None:
            return self
        block_mask = flex_attention_mask(
            *visible.shape,
            mask_function=lambda batch, head, query, key: visible[batch, query, key],
            device=visible.device,
        )
        return replace(self, block_mask=block_mask)

    def distance_indices(self, num_keys: int) -> Tensor:
        """(batch, 1, queries, keys) index of the distance between query and key."""
        return (self.distance_offsets + torch.arange(num_keys, device=self.distance_offsets.device))[:, None]

    def differing_segments(self) -> Tensor | None:
        """(batch, 1, queries, keys) bool, True where query and key are in different segments; None without segments."""
        if self.query_segments is None or self.key_segments is None:
            return None
        return (self.query_segments[:, :, None] != self.key_segments[:, None, :])[:, None]


class DensePattern(NamedTuple):
    """An `AttentionPattern` as the tensors of `dense_attention`, computed once for all layers.

    Attributes:
        distance_indices: (batch, 1, queries, keys) index of the distance between query and key.
        mask: (batch, 1, queries, keys), added to the scores; finite, so that a query without a visible key does not
            become NaN. None if all keys are visible.
        has_visible_key: (batch, queries, 1, 1) bool; None if all keys are visible.
        segment_scale: (batch, 1, queries, keys), the factor of the scores where query and key are in different
            segments, else 0; None without segments.
    """

    distance_indices: Tensor
    mask: Tensor | None
    has_visible_key: Tensor | None
    segment_scale: Tensor | None

    @classmethod
    def build(cls, pattern: AttentionPattern, num_keys: int, dtype: torch.dtype, scaling: float) -> "DensePattern":
        """The tensors for a number of keys, and the dtype and factor of the scores."""
        indices = pattern.distance_indices(num_keys)
        mask = has_visible_key = None
        if pattern.visible is not None:
            hidden_score = max(-1e30, torch.finfo(dtype).min / 2)  # half, since the position term is added
            mask = torch.zeros(pattern.visible.shape, dtype=dtype, device=indices.device)
            mask = mask.masked_fill(~pattern.visible, hidden_score)[:, None]
            has_visible_key = pattern.visible.any(-1)[..., None, None]
        differs = pattern.differing_segments()
        segment_scale = None if differs is None else differs.to(dtype) * scaling
        return cls(indices, mask, has_visible_key, segment_scale)

    def select_queries(self, queries: slice) -> "DensePattern":
        """The pattern of a slice of the queries."""
        return DensePattern(
            self.distance_indices[:, :, queries],
            None if self.mask is None else self.mask[:, :, queries],
            None if self.has_visible_key is None else self.has_visible_key[:, queries],
            None if self.segment_scale is None else self.segment_scale[:, :, queries],
        )


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
    indices = pattern.distance_indices(key.shape[1])
    scores = (content + _position_scores(query + biases.position, relative, indices)) * scaling
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
    pattern: DensePattern,
    *,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attend by torch's SDPA, with the position and segment terms as additive mask; arguments as in `eager_attention`.

    Batches with more than `MAX_DENSE_QUERIES` queries are computed in equal blocks and recomputed in the backward pass,
    so that memory grows linearly with the length.
    """

    def attend(query: Tensor, pattern: DensePattern) -> Tensor:
        bias = _position_scores((query + biases.position) * scaling, relative, pattern.distance_indices)
        if pattern.segment_scale is not None:
            difference = _segment_difference(query, biases)
            bias.addcmul_(difference[..., None], pattern.segment_scale.to(bias.dtype))  # the largest tensor: in place
        if pattern.mask is not None:
            bias.add_(pattern.mask.to(bias.dtype))
        content = (query + biases.content).to(query.dtype)
        content, keys, values = (tensor.transpose(1, 2) for tensor in (content, key, value))
        context = F.scaled_dot_product_attention(
            content, keys, values, attn_mask=bias.to(query.dtype), dropout_p=dropout, scale=scaling
        ).transpose(1, 2)
        if torch.compiler.is_exporting():  # the SDPA kernels, selected at run time, return different strides
            context = context.clone(memory_format=torch.contiguous_format)
        return context if pattern.has_visible_key is None else context * pattern.has_visible_key

    num_queries = query.shape[1]
    max_queries = MAX_DENSE_QUERIES if query.device.type == "cpu" else _MAX_DENSE_QUERIES_ON_GPU
    if torch.compiler.is_compiling() or num_queries <= max_queries:
        return attend(query, pattern)
    size = math.ceil(num_queries / math.ceil(num_queries / max_queries))
    blocks = [slice(start, start + size) for start in range(0, num_queries, size)]
    attend_checkpointed = partial(checkpoint, attend, use_reentrant=False)
    return torch.cat([attend_checkpointed(query[:, block], pattern.select_queries(block)) for block in blocks], 1)


def flex_attention(
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
    """Attend by torch's FlexAttention; arguments as in `eager_attention`.

    The kernel reads the position term by distance from (batch, heads, queries, distances) scores, which autograd keeps
    for the backward pass. `dense_attention` computes the same tensor, and from it the additive mask of SDPA.

    Raises:
        CtxError: `dropout` is not 0.
    """
    if dropout > 0:
        raise CtxError(
            f"FlexAttention has no dropout, but the dropout of the attention probabilities is {dropout:g}.",
            hint="set attention_probs_dropout_prob=0.0 in the configuration, or use attn_implementation='sdpa'.",
        )
    scores_by_distance = _scores_by_distance((query + biases.position) * scaling, relative)
    # in float32, since the gradient of a score is a sum over the keys, accumulated in its data type
    segment_scores = _segment_difference(query, biases).float() * scaling
    offsets = pattern.distance_offsets[..., 0]
    query_segments, key_segments = pattern.query_segments, pattern.key_segments

    def add_terms(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score + scores_by_distance[batch, head, i, offsets[batch, i] + j]
        if query_segments is None or key_segments is None:
            return score
        differs = query_segments[batch, i] != key_segments[batch, j]
        return score + torch.where(differs, segment_scores[batch, head, i], 0.0)

    content = (query + biases.content).to(query.dtype)
    context = compile_friendly_flex_attention(
        *(tensor.transpose(1, 2) for tensor in (content, key, value)),
        training=torch.is_grad_enabled(),
        score_mod=add_terms,
        block_mask=pattern.block_mask,
        scale=scaling,
    )
    return context.transpose(1, 2)


def _position_scores(query: Tensor, relative: Tensor, distance_indices: Tensor) -> Tensor:
    """(batch, heads, queries, keys) position term, gathered by distance from the scores of all distances."""
    scores_by_distance = _scores_by_distance(query, relative)
    return scores_by_distance.gather(-1, distance_indices.expand(-1, scores_by_distance.shape[1], -1, -1))


def _scores_by_distance(query: Tensor, relative: Tensor) -> Tensor:
    """(batch, heads, queries, distances) position term of all distances."""
    if len(relative) == 1:
        return torch.einsum("bihd,whd->bhiw", query, relative.squeeze(0))
    return torch.einsum("bihd,bwhd->bhiw", query, relative)


def _segment_difference(query: Tensor, biases: RelativeBiases) -> Tensor:
    """(batch, heads, queries) segment term of keys in another segment minus the term of keys in the same segment.

    With the difference for keys in another segment and 0 for others, the scores of a query change by a constant, to
    which the softmax is invariant.
    """
    same_segment, other_segment = biases.segment_embeddings.unbind()
    return torch.einsum("bihd,hd->bhi", query + biases.segment, other_segment - same_segment)
