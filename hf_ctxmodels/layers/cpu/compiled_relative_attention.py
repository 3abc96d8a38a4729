"""`attend_per_sequence` in compiled graphs, as one operator."""

import torch
from torch import Tensor

from hf_ctxmodels.core.compiled_ops import define_differentiable_operator
from hf_ctxmodels.layers.cpu.relative_attention import RelativeBiases, attend_per_sequence, build_ranges

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor relative, Tensor content_bias, Tensor position_bias, "
    "Tensor segment_bias, Tensor segment_embeddings, Tensor? query_lengths, Tensor? key_lengths, Tensor offsets, "
    "Tensor? visible, Tensor? query_segments, Tensor? key_segments, Tensor? key_columns, SymInt batch_size, "
    "SymInt length, SymInt num_content, float scaling, float dropout"
)


def relative_attention_traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: RelativeBiases,
    *,
    batch_size: int,
    length: int,
    offsets: Tensor,
    num_content: int,
    scaling: float,
    dropout: float,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    visible: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    key_columns: Tensor | None = None,
) -> Tensor:
    """`attend_per_sequence`; other arguments as in `build_ranges`.

    Args:
        query_lengths, key_lengths: (sequences,) int64; None for `batch_size` sequences of equal length, and
            `query_lengths` None if they equal `key_lengths`.
        query_segments: None if they equal `key_segments`.
    """
    ranges = offsets, visible, query_segments, key_segments, key_columns, batch_size, length, num_content
    return _relative_attention(
        query, key, value, relative, *biases, query_lengths, key_lengths, *ranges, scaling, dropout
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    segment_bias: Tensor,
    segment_embeddings: Tensor,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    offsets: Tensor,
    visible: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    key_columns: Tensor | None,
    batch_size: int,
    length: int,
    num_content: int,
    scaling: float,
    dropout: float,
) -> Tensor:
    query_counts, key_counts = (
        [len(states) // batch_size] * batch_size if lengths is None else lengths.tolist()
        for states, lengths in ((query, key_lengths if query_lengths is None else query_lengths), (key, key_lengths))
    )
    with torch.no_grad():
        ranges = build_ranges(
            query_counts,
            key_counts,
            offsets=offsets,
            length=length,
            num_content=num_content,
            num_groups=len(relative),
            visible=visible,
            query_segments=key_segments if query_segments is None else query_segments,
            key_segments=key_segments,
            key_columns=key_columns,
        )
    biases = RelativeBiases(content_bias, position_bias, segment_bias, segment_embeddings)
    return attend_per_sequence(query, key, value, relative, biases, ranges, scaling=scaling, dropout=dropout)


_relative_attention = define_differentiable_operator(
    "relative_attention",
    _ARGUMENTS,
    _attend,
    lambda first, *inputs: first.new_empty(first.shape),
    num_differentiable=8,
)
