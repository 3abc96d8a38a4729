"""Attention with relative positions on a CPU: one sequence at a time, so that its scores fit the processor's cache.

It computes the score of `models.xlnet.relative_attention`, which also has the reference implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu.dropout import DROPOUT_LEVELS, dropout_mask, inverted_dropout_scale

_MASKED_SCORE = -1e30  # a probability of 0; finite, so that a query without a visible key does not become NaN
_BLOCK_SIZE = 64  # queries whose position scores are computed at once: fewer distances per block, in cache


class RelativeBiases(NamedTuple):
    """Learned parameters of the score: u, v and s, (heads, head_dim) each, which are added to the query in the content,
    position and segment terms; and e, (2, heads, head_dim), for a key of the same and of another segment."""

    content: Tensor
    position: Tensor
    segment: Tensor
    segment_embeddings: Tensor


@dataclass(frozen=True)
class SequenceRange:
    """The queries and keys of one sequence in the packed tensors of a batch.

    Attributes:
        num_content: Number of leading queries that are at the positions 0, 1, 2, ... of the sequence.
        distance_origin: Index of the distance between position 0 and the sequence's first key.
        distance_indices: (queries - num_content, keys) index of the distance between the other queries and the keys;
            None without other queries.
        score_mask: (queries, keys), added to the scores; None if all keys are visible.
        encoding_group: Index of the distance encodings of this sequence.
    """

    queries: slice
    keys: slice
    num_content: int
    distance_origin: int
    distance_indices: Tensor | None = None
    score_mask: Tensor | None = None
    encoding_group: int = 0

    def distances(self, start: int, stop: int) -> slice:
        """Indices of the distances between the content queries start ... stop - 1 and the keys, farthest first."""
        return slice(self.distance_origin - stop + 1, self.distance_origin - start + self.keys.stop - self.keys.start)


@dataclass(frozen=True)
class SequenceRanges:
    """The sequences of a packed batch.

    Attributes:
        query_segments, key_segments: (queries, segments) and (keys, segments) one-hot, float32; None to omit the
            segment term.
        queries_without_keys: (queries,) bool, True where no key is visible; None if there is no such query.
    """

    sequences: tuple[SequenceRange, ...]
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    queries_without_keys: Tensor | None = None


def runs_per_sequence(tensor: Tensor) -> bool:
    """Whether `attend_per_sequence` supports a tensor: float32 on a CPU, outside exported graphs."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and not torch.compiler.is_exporting()


def build_ranges(
    query_counts: Sequence[int],
    key_counts: Sequence[int],
    *,
    offsets: Tensor,
    length: int,
    num_content: int,
    num_groups: int,
    visible: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    key_columns: Tensor | None = None,
) -> SequenceRanges:
    """The ranges of a batch of sequences.

    Args:
        query_counts, key_counts: Number of queries and keys of each sequence.
        offsets: (queries, 1) index of the distance between a query and column 0 of the keys.
        length: Index of the distance 0.
        num_content: Number of leading queries of each sequence that are its first tokens; the rest may be elsewhere.
        num_groups: Number of groups of distance encodings.
        visible: (sequences, queries, keys) bool; None if all keys are visible.
        query_segments, key_segments: Segment ids of all queries and keys, in any shape; None to omit the segment term.
        key_columns: (keys,) column of each key; None for 0, 1, 2, ... in each sequence.
    """
    score_masks = queries_without_keys = None
    if visible is not None:
        score_masks = torch.zeros(visible.shape).masked_fill_(~visible, _MASKED_SCORE)
        has_no_key = ~visible.any(-1).flatten()
        queries_without_keys = has_no_key if bool(has_no_key.any()) else None
    sequences, query_start, key_start = [], 0, 0
    for number, (num_queries, num_keys) in enumerate(zip(query_counts, key_counts, strict=True)):
        queries, keys = slice(query_start, query_start + num_queries), slice(key_start, key_start + num_keys)
        query_start, key_start = queries.stop, keys.stop
        columns = torch.arange(num_keys) if key_columns is None else key_columns[keys]
        is_contiguous = key_columns is None or int(columns[-1] - columns[0]) == num_keys - 1
        num_leading = min(num_content, num_queries) if is_contiguous else 0
        distance_indices = offsets[queries][num_leading:] + columns if num_queries > num_leading else None
        if num_queries:
            sequences.append(
                SequenceRange(
                    queries,
                    keys,
                    num_content=num_leading,
                    distance_origin=length,
                    distance_indices=distance_indices,
                    score_mask=None if score_masks is None else score_masks[number],
                    encoding_group=number * num_groups // len(key_counts),
                )
            )
    if query_segments is None or key_segments is None:
        return SequenceRanges(tuple(sequences), queries_without_keys=queries_without_keys)
    segments, indices = torch.cat([query_segments.flatten(), key_segments.flatten()]).unique(return_inverse=True)
    one_hot = F.one_hot(indices, len(segments)).float()
    query_one_hot, key_one_hot = one_hot.split([query_segments.numel(), key_segments.numel()])
    return SequenceRanges(tuple(sequences), query_one_hot, key_one_hot, queries_without_keys)


def attend_per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: RelativeBiases,
    ranges: SequenceRanges,
    *,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attention within each sequence, on a CPU in float32.

    The segment term is part of the content term: with one-hot segments t, a query is extended by -d * t, where d is its
    segment score for another segment minus that for the same segment, and a key by its t. The product subtracts d where
    the segments are equal. The result differs from the score by a constant per query, to which a softmax is invariant.

    Args:
        query: (queries, heads, head_dim).
        key, value: (keys, heads, head_dim).
        relative: (groups, distances, heads, head_dim), the projected distance encodings.
        dropout: Dropout rate on the probabilities.

    Returns:
        (queries, heads, head_dim), zero for queries without a visible key.
    """
    query = query.transpose(0, 1)
    content_query = torch.add((biases.content * scaling)[:, None], query, alpha=scaling)
    position_query = torch.add((biases.position * scaling)[:, None], query, alpha=scaling)
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if ranges.query_segments is not None and ranges.key_segments is not None:
        direction = (biases.segment_embeddings[1] - biases.segment_embeddings[0]) * scaling  # (heads, head_dim)
        difference = query @ direction[..., None] + (biases.segment * direction).sum(-1)[:, None, None]
        content_query = torch.cat([content_query, ranges.query_segments * -difference], -1)
        key = torch.cat([key, ranges.key_segments.expand(len(key), -1, -1)], -1)
    context = _PerSequenceAttention.apply(
        content_query,
        position_query,
        key,
        value,
        relative.transpose(1, 2).contiguous(),
        ranges,
        dropout,
        torch.is_grad_enabled(),
    )
    return context.transpose(0, 1)


class _PerSequenceAttention(torch.autograd.Function):
    """Softmax of content and position scores, multiplied with the values, one sequence at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        content_query: Tensor,
        position_query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        ranges: SequenceRanges,
        dropout: float,
        is_grad_enabled: bool,  # always False inside an autograd.Function
    ) -> Tensor:
        heads, num_queries, head_dim = position_query.shape
        context = torch.empty(num_queries, heads, head_dim).transpose(0, 1)
        ctx.dropout_levels = min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)
        ctx.ranges, ctx.saved_probabilities = ranges, []
        needs_backward = is_grad_enabled and any(ctx.needs_input_grad)
        for sequence in ranges.sequences:
            queries, keys = sequence.queries, sequence.keys
            scores = _position_scores(sequence, position_query[:, queries], relative[sequence.encoding_group])
            scores.baddbmm_(content_query[:, queries], key[:, keys].transpose(1, 2))
            probabilities = torch.softmax(scores, -1, out=scores)
            mask = dropout_mask(scores.shape, ctx.dropout_levels) if ctx.dropout_levels else None
            dropped = _apply_dropout(probabilities, mask, ctx.dropout_levels)
            context[:, queries] = torch.bmm(dropped, value[:, keys])
            if needs_backward:
                ctx.saved_probabilities.append((probabilities, mask))
        if ranges.queries_without_keys is not None:
            context[:, ranges.queries_without_keys] = 0
        if needs_backward:
            ctx.save_for_backward(content_query, position_query, key, value, relative, context)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        content_query, position_query, key, value, relative, context = ctx.saved_tensors
        if ctx.ranges.queries_without_keys is not None:
            grad = grad.index_fill(1, ctx.ranges.queries_without_keys.nonzero().squeeze(1), 0)
        grad_content_query, grad_position_query = torch.empty_like(content_query), torch.empty_like(position_query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        grad_relative = torch.zeros_like(relative)
        # The gradient of a softmax subtracts the mean per query, which equals grad . context with any dropout mask.
        mean = (grad * context).sum(-1, keepdim=True)
        for sequence, (probabilities, mask) in zip(ctx.ranges.sequences, ctx.saved_probabilities, strict=True):
            queries, keys, group = sequence.queries, sequence.keys, sequence.encoding_group
            dropped = _apply_dropout(probabilities, mask, ctx.dropout_levels)
            grad_value[:, keys] = torch.bmm(dropped.transpose(1, 2), grad[:, queries])
            grad_scores = torch.bmm(grad[:, queries], value[:, keys].transpose(1, 2))
            if mask is not None:
                grad_scores.mul_(mask).mul_(inverted_dropout_scale(ctx.dropout_levels))
            grad_scores.sub_(mean[:, queries]).mul_(probabilities)
            grad_content_query[:, queries] = torch.bmm(grad_scores, key[:, keys])
            grad_key[:, keys] = torch.bmm(grad_scores.transpose(1, 2), content_query[:, queries])
            _position_backward(
                sequence,
                grad_scores,
                position_query[:, queries],
                relative[group],
                grad_position_query[:, queries],
                grad_relative[group],
            )
        return grad_content_query, grad_position_query, grad_key, grad_value, grad_relative, None, None, None


def _apply_dropout(probabilities: Tensor, mask: Tensor | None, levels: int) -> Tensor:
    return probabilities if mask is None else (probabilities * mask).mul_(inverted_dropout_scale(levels))


def _position_scores(sequence: SequenceRange, query: Tensor, relative: Tensor) -> Tensor:
    """(heads, queries, head_dim) and (heads, distances, head_dim) -> (heads, queries, keys), plus the score mask."""
    heads, num_queries, _ = query.shape
    num_keys = sequence.keys.stop - sequence.keys.start
    scores = query.new_empty(heads, num_queries, num_keys)
    for start in range(0, sequence.num_content, _BLOCK_SIZE):
        stop = min(start + _BLOCK_SIZE, sequence.num_content)
        distances = sequence.distances(start, stop)
        scores_by_distance = torch.bmm(query[:, start:stop], relative[:, distances].transpose(1, 2))
        scores[:, start:stop] = _shift_distances_to_keys(scores_by_distance, num_keys)
    if sequence.distance_indices is not None:
        scores_by_distance = torch.bmm(query[:, sequence.num_content :], relative.transpose(1, 2))
        indices = sequence.distance_indices.expand(heads, -1, -1)
        scores[:, sequence.num_content :] = scores_by_distance.gather(-1, indices)
    return scores if sequence.score_mask is None else scores.add_(sequence.score_mask)


def _position_backward(
    sequence: SequenceRange,
    grad_scores: Tensor,
    query: Tensor,
    relative: Tensor,
    grad_query: Tensor,
    grad_relative: Tensor,
) -> None:
    """Backward pass of `_position_scores`: overwrites `grad_query` and adds to `grad_relative`."""
    heads, _, num_keys = grad_scores.shape
    for start in range(0, sequence.num_content, _BLOCK_SIZE):
        stop = min(start + _BLOCK_SIZE, sequence.num_content)
        distances = sequence.distances(start, stop)
        grad_by_distance = grad_scores.new_zeros(heads, stop - start, num_keys + stop - start - 1)
        _shift_distances_to_keys(grad_by_distance, num_keys).copy_(grad_scores[:, start:stop])
        grad_query[:, start:stop] = torch.bmm(grad_by_distance, relative[:, distances])
        grad_relative[:, distances].baddbmm_(grad_by_distance.transpose(1, 2), query[:, start:stop])
    if sequence.distance_indices is not None:
        remaining = slice(sequence.num_content, None)
        grad_by_distance = grad_scores.new_zeros(heads, len(sequence.distance_indices), relative.shape[1])
        indices = sequence.distance_indices.expand(heads, -1, -1)
        grad_by_distance.scatter_(-1, indices, grad_scores[:, remaining])
        grad_query[:, remaining] = torch.bmm(grad_by_distance, relative)
        grad_relative.baddbmm_(grad_by_distance.transpose(1, 2), query[:, remaining])


def _shift_distances_to_keys(by_distance: Tensor, num_keys: int) -> Tensor:
    """(heads, queries, keys + queries - 1), one column per distance -> a view (heads, queries, keys).

    The first key has the largest distance from the last query: column 0. Each preceding query starts one column later.
    """
    heads, num_queries, width = by_distance.shape
    return by_distance.as_strided((heads, num_queries, num_keys), (num_queries * width, width - 1, 1), num_queries - 1)
