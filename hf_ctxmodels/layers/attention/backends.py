"""`attend`: attention for all layouts, masks and devices.

Packed tokens attend in groups of sequences of similar length on the CPU, by torch's variable-length flash kernel on
CUDA if it supports the mask, and padded for attention alone elsewhere. Padded batches use the attention interface of
transformers: eager, sdpa, flex, flash, or an implementation that the user registered there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ctxmodels.layers.attention.banded_attention import banded_attention
from hf_ctxmodels.layers.attention.layouts import Layout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import (
    BIDIRECTIONAL,
    AttentionMask,
    PackedMask,
    PaddedMask,
    SequenceGroup,
    prepare_mask,
)
from hf_ctxmodels.layers.attention.reference import eager_attention_forward
from hf_ctxmodels.layers.cpu.dropout import scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    mask: AttentionMask = BIDIRECTIONAL,
    *,
    scale: float,
    dropout: float = 0.0,
    key_layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention within each sequence.

    Args:
        query: (..., heads, head_dim) at the computed tokens of `layout`.
        key, value: (..., heads, head_dim) at all tokens of `key_layout`, or of a cache.
        layout: The layout of the queries.
        mask: Attention pattern within a sequence; prepare it (`prepare_mask`) if several layers share it.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities; 0 in evaluation.
        key_layout: The layout of the keys in cross-attention; None for the layout of the queries.

    Returns:
        The context in the shape of `query`, and the (batch, heads, queries, keys) probabilities if the implementation
        returns them (eager), otherwise None.
    """
    prepared = prepare_mask(mask, layout, query, key_layout)
    if isinstance(prepared, PackedMask):
        return _attend_packed(query, key, value, prepared, scale, dropout), None
    assert isinstance(layout, PaddedLayout)
    return _attend_padded(query, key, value, layout, prepared, scale, dropout)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float, dropout: float) -> Tensor:
    if not query.shape[0]:  # no query is computed: a batch without targets
        return query
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and is_half and not dropout and (window := mask.varlen_window) is not None:
        # imported here, because it registers operators, a sixth of the package's import time
        from torch.nn.attention.varlen import varlen_attn

        max_lengths = max(mask.queries.query_counts), max(mask.keys.lengths)
        context = varlen_attn(
            query, key, value, *mask.cumulative_lengths, *max_lengths, scale=scale, window_size=window
        )
        return cast(Tensor, context)
    return attend_in_groups(
        query, key, value, mask.groups, mask.queries.query_counts, mask.keys.lengths, scale=scale, dropout=dropout
    )


def attend_in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[SequenceGroup],
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scale: float,
    dropout: float,
) -> Tensor:
    """Variable-length attention: the sequences of each group are padded and attend in one call.

    Args:
        query: (queries, heads, head_dim).
        key, value: (tokens, heads, head_dim).
        groups: The sequences that attend together, with their masks.
        query_lengths, key_lengths: Number of queries and keys of each sequence.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.

    Returns:
        (queries, heads, head_dim).
    """
    query_sequences = query.split(query_lengths)
    key_sequences, value_sequences = key.split(key_lengths), value.split(key_lengths)
    max_length = max(max(group.num_queries, group.num_keys) for group in groups)
    padding = query.new_zeros(max_length, *query.shape[1:])
    contexts: dict[int, Tensor] = {}
    for group in groups:
        is_whole_batch = len(groups) == 1 and len(group.members) == len(key_lengths)
        if is_whole_batch and len(query) == len(group.members) * group.num_queries:
            queries = query.unflatten(0, (len(group.members), group.num_queries))
        else:
            queries = _pad_sequences(query_sequences, group.members, group.num_queries, padding)
        if is_whole_batch and len(key) == len(group.members) * group.num_keys:
            keys = key.unflatten(0, (len(group.members), group.num_keys))
            values = value.unflatten(0, (len(group.members), group.num_keys))
        else:
            keys = _pad_sequences(key_sequences, group.members, group.num_keys, padding)
            values = _pad_sequences(value_sequences, group.members, group.num_keys, padding)
        context = _attend_group(queries, keys, values, group, scale, dropout)
        if is_whole_batch and len(context) * group.num_queries == len(query):
            return context.flatten(0, 1)
        lengths = [query_lengths[member] for member in group.members]
        contexts |= zip(group.members, _unpad_sequences(context, lengths))
    return torch.cat([contexts[index] for index in sorted(contexts)])


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup, scale: float, dropout: float
) -> Tensor:
    """(members, length, heads, head_dim) each -> the context."""
    if group.window is not None:
        return banded_attention(query, key, value, group.window, scale=scale, dropout=dropout)
    return scaled_dot_product_attention(
        query, key, value, group.mask, is_causal=group.is_causal, scale=scale, dropout=dropout
    )


def _pad_sequences(sequences: Sequence[Tensor], members: Sequence[int], length: int, padding: Tensor) -> Tensor:
    """(members, length, heads, head_dim); without a copy for a single sequence."""
    if len(members) == 1:
        return sequences[members[0]][None]
    padded = []
    for member in members:
        padded += [sequences[member], padding[: length - len(sequences[member])]]
    return torch.cat(padded).unflatten(0, (len(members), length))


def _unpad_sequences(context: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """(members, queries, heads, head_dim) -> (length, heads, head_dim) of each sequence."""
    if len(lengths) == 1:
        return [context[0]]
    num_queries = context.shape[1]
    sizes = []
    for length in lengths:
        sizes += [length, num_queries - length]
    return context.flatten(0, 1).split(sizes)[::2]


@dataclass(frozen=True, eq=False)
class _AttentionModule:
    """Stand-in for a module and its configuration, with the attributes that transformers' attention functions read."""

    training: bool
    is_causal: bool
    _attn_implementation: str
    dtype: torch.dtype
    _is_quantized: bool = True  # flash attention then casts float32 to `dtype` instead of looking for weights

    @property
    def config(self) -> "_AttentionModule":
        """Return this object, which has the attributes of the configuration."""
        return self


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PaddedLayout,
    mask: PaddedMask,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(layout.implementation, eager_attention_forward)
    options = dict(layout.attention_kwargs)
    if mask.bias is not None:
        options["position_bias"] = mask.bias.to(query.dtype)
    if layout.is_flash and mask.spec.window is not None:
        options["sliding_window"] = mask.spec.window
    context, probabilities = attention(
        _AttentionModule(dropout > 0, mask.is_causal, layout.implementation, query.dtype),
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask.mask,
        dropout=dropout,
        scaling=scale,
        is_causal=mask.is_causal,
        **options,
    )
    if torch.compiler.is_exporting():  # the kernel chose its memory format, and ONNX replaces the kernel
        context = context.clone(memory_format=torch.contiguous_format)
    return context, probabilities
