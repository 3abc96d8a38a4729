"""`attend`: attention for all layouts, masks and devices.

Packed tokens attend in groups of sequences of similar length on the CPU, by torch's variable-length flash kernel on
CUDA if it supports the GPU, the dtype and the mask, and padded for attention alone elsewhere. Padded batches use the
attention interface of transformers: eager, sdpa, flex, flash, or an implementation that the user registered there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced
from hf_ctxmodels.layers.attention.layouts import Layout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL
from hf_ctxmodels.layers.attention.prepared_masks import (
    AttentionMask,
    PackedMask,
    PaddedMask,
    SequenceGroup,
    prepare_mask,
)
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
        mask: Attention pattern within a sequence; prepare it (`prepare_mask`) if several layers share it.
        dropout: Dropout on the probabilities; 0 in evaluation.
        key_layout: The layout of the keys in cross-attention.

    Returns:
        The context in the shape of `query`, and the (batch, heads, queries, keys) probabilities if the implementation
        returns them (eager), otherwise None.
    """
    prepared = prepare_mask(mask, layout, query, key_layout)
    if isinstance(prepared, PaddedMask):
        assert isinstance(layout, PaddedLayout)
        return _attend_padded(query, key, value, layout, prepared, scale, dropout)
    assert isinstance(prepared, PackedMask)
    if not query.shape[0]:  # no query is computed: a batch without targets
        return query, None
    is_supported = query.is_cuda and supports_varlen(
        torch.cuda.get_device_capability(query.device), query.shape[-1], query.dtype
    )
    if is_supported and prepared.varlen_window is not None:
        return attend_by_varlen_kernel(query, key, value, prepared, scale=scale, dropout=dropout), None
    if prepared.is_single:
        return attend_in_one_group(query, key, value, prepared, scale=scale, dropout=dropout), None
    query_lengths, key_lengths = prepared.queries.query_counts, prepared.keys.lengths
    context = attend_in_groups(
        query, key, value, prepared.groups, query_lengths, key_lengths, scale=scale, dropout=dropout
    )
    return context, None


def supports_varlen(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length flash kernel supports a GPU of this compute capability, forward and backward.

    Above a width of 192, the backward pass with dropout needs the shared memory of the data-center GPUs 8.0 and 9.0.
    """
    max_width = 256 if capability in ((8, 0), (9, 0)) else 192
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= max_width


def attend_by_varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, *, scale: float, dropout: float
) -> Tensor:
    """Variable-length flash attention (Dao 2023, arXiv 2307.08691); shapes as in `attend_in_groups`.

    This is the operator of `torch.nn.attention.varlen.varlen_attn`, which has no dropout.
    """
    assert mask.varlen_window is not None
    left, right = mask.varlen_window
    context, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *mask.cumulative_lengths,
        max(mask.queries.query_counts),
        max(mask.keys.lengths),
        dropout,
        (left, right) == (-1, 0),
        False,  # no debugging output
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return cast(Tensor, context)


def attend_in_one_group(
    query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, *, scale: float, dropout: float
) -> Tensor:
    """`attend_in_groups` with a single group, in a number of kernels that does not depend on the number of sequences.

    Queries, keys and values are copied together to their indices in the padded batch.
    """
    (group,) = mask.groups
    query_indices, key_indices = mask.padded_indices
    num_sequences = len(group.sequence_indices)
    if query_indices is key_indices and group.num_queries == group.num_keys:
        queries, keys, values = _pad_batch((query, key, value), query_indices, num_sequences, group.num_queries)
    else:
        (queries,) = _pad_batch((query,), query_indices, num_sequences, group.num_queries)
        keys, values = _pad_batch((key, value), key_indices, num_sequences, group.num_keys)
    context = _attend_group(queries, keys, values, group, scale=scale, dropout=dropout).flatten(0, 1)
    return context if query_indices is None else context.index_select(0, query_indices)


def _pad_batch(
    states: tuple[Tensor, ...], indices: Tensor | None, num_sequences: int, length: int
) -> tuple[Tensor, ...]:
    """(tokens, heads, head_dim) -> (sequences, length, heads, head_dim) each, zeros at padding."""
    shape = num_sequences, length
    if indices is None:
        return tuple(tensor.unflatten(0, shape) for tensor in states)
    stacked = torch.stack(states, 1)
    padded = stacked.new_zeros(num_sequences * length, *stacked.shape[1:]).index_copy_(0, indices, stacked)
    return padded.unflatten(0, shape).unbind(2)


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

    `query` and the result are (queries, heads, head_dim), keys and values (tokens, heads, head_dim); the lengths are
    the numbers of queries and keys of each sequence.
    """
    query_sequences = query.split(query_lengths)
    key_sequences, value_sequences = key.split(key_lengths), value.split(key_lengths)
    max_length = max(max(group.num_queries, group.num_keys) for group in groups)
    padding = query.new_zeros(max_length, *query.shape[1:])
    contexts: dict[int, Tensor] = {}
    for group in groups:
        indices = group.sequence_indices
        queries = _pad_sequences(query, query_sequences, indices, group.num_queries, padding)
        keys = _pad_sequences(key, key_sequences, indices, group.num_keys, padding)
        values = _pad_sequences(value, value_sequences, indices, group.num_keys, padding)
        context = _attend_group(queries, keys, values, group, scale=scale, dropout=dropout)
        if len(indices) == len(query_lengths) and len(indices) * group.num_queries == len(query):
            return context.flatten(0, 1)  # of the whole batch, without padding
        lengths = [query_lengths[index] for index in indices]
        contexts |= zip(indices, _unpad_sequences(context, lengths))
    return torch.cat([contexts[index] for index in sorted(contexts)])


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup, *, scale: float, dropout: float
) -> Tensor:
    """Attention of the padded sequences of a group; query, key, value and result as in `banded_attention`."""
    if group.window is not None:
        return banded_attention(query, key, value, group.window, scale=scale, dropout=dropout)
    return scaled_dot_product_attention(
        query, key, value, group.mask, is_causal=group.is_causal, scale=scale, dropout=dropout
    )


def _pad_sequences(
    packed: Tensor, sequences: Sequence[Tensor], members: Sequence[int], length: int, padding: Tensor
) -> Tensor:
    """(members, length, heads, head_dim) of the `sequences` of `packed`; without a copy for a single sequence, and for
    a whole batch without padding."""
    if len(members) == len(sequences) and len(members) * length == len(packed):
        return packed.unflatten(0, (len(members), length))
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
    """Stand-in for a module and its configuration, as transformers' attention functions read them."""

    training: bool
    is_causal: bool
    _attn_implementation: str
    dtype: torch.dtype
    _is_quantized: bool = True  # flash attention then casts float32 to `dtype` instead of looking for weights

    @property
    def config(self) -> "_AttentionModule":
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
        options["position_bias"] = mask.bias.to(query.dtype) if isinstance(mask.bias, Tensor) else mask.bias
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


def missing_attention_weights() -> CtxError:
    """The error for `output_attentions` with an implementation that returns no attention weights."""
    return CtxError(
        "output_attentions=True, but the attention implementation in use returns no attention weights.",
        hint='use attn_implementation="eager": model.set_attn_implementation("eager").',
    )


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), with the signature of transformers' functions.

    Args:
        query, key, value: (batch, heads, length, head_dim).
        attention_mask, position_bias: Broadcastable to (batch, heads, queries, keys): additive, or bool, False at
            masked keys.

    Returns:
        (batch, queries, heads, head_dim) context and (batch, heads, queries, keys) probabilities.
    """
    scores = query @ key.transpose(2, 3) * scaling
    for bias in (position_bias, attention_mask):
        if bias is not None and bias.dtype == torch.bool:
            scores = scores.masked_fill(~bias, torch.finfo(scores.dtype).min)
        elif bias is not None:
            scores = scores + bias
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


_MIN_BLOCK_SIZE = 64  # queries


def banded_attention(query: Tensor, key: Tensor, value: Tensor, window: int, *, scale: float, dropout: float) -> Tensor:
    """Causal attention of each query to the last `window` positions up to and including itself (Child et al. 2019,
    arXiv 1904.10509, section 4).

    Only the band is computed: time and memory grow with length times window. On a CPU blocks of queries attend one
    after the other to slices of the keys, elsewhere all in one call to copies of them. Query, key, value and result are
    (batch, length, heads, head_dim); padding follows all tokens of a sequence.
    """
    size = max(_MIN_BLOCK_SIZE, window // 2)
    if query.device.type == "cpu" and not dropout and not is_traced(query):
        return _BlockwiseAttention.apply(query, key, value, window, size, scale)
    return _attend_all_blocks(query, key, value, window, size, scale=scale, dropout=dropout)


class _BlockwiseAttention(torch.autograd.Function):
    """Attention of each block of queries by torch's CPU kernel; autograd would allocate a gradient of all keys for each
    slice."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, size: int, scale: float) -> Tensor:
        """(batch, length, heads, head_dim)."""
        context, log_sums = torch.empty_like(query), []
        mask = _additive_mask(_outside_band(size, window - 1, window, query.device), query)
        for block, band_keys, columns in _block_slices(query.shape[1], size, window):
            block_mask = mask[: block.stop - block.start, columns]
            block_context, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, block].transpose(1, 2),
                key[:, band_keys].transpose(1, 2),
                value[:, band_keys].transpose(1, 2),
                attn_mask=block_mask,
                scale=scale,
            )
            context[:, block] = block_context.transpose(1, 2)
            log_sums.append(log_sum)
        ctx.save_for_backward(query, key, value, context, mask, *log_sums)
        ctx.window, ctx.size, ctx.scale = window, size, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, context, mask, *log_sums = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        slices = _block_slices(query.shape[1], ctx.size, ctx.window)
        for (block, band_keys, columns), log_sum in zip(slices, log_sums, strict=True):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, block].transpose(1, 2),
                query[:, block].transpose(1, 2),
                key[:, band_keys].transpose(1, 2),
                value[:, band_keys].transpose(1, 2),
                context[:, block].transpose(1, 2),
                log_sum,
                0.0,
                False,
                attn_mask=mask[: block.stop - block.start, columns],
                scale=ctx.scale,
            )
            grad_query[:, block] = gradients[0].transpose(1, 2)
            grad_key[:, band_keys] += gradients[1].transpose(1, 2)
            grad_value[:, band_keys] += gradients[2].transpose(1, 2)
        return grad_query, grad_key, grad_value, None, None, None


def _block_slices(length: int, size: int, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of each block's queries, of the keys in their bands, and of these keys' columns in a block's mask."""
    for start in range(0, length, size):
        stop, first_key = min(start + size, length), max(0, start - window + 1)
        skipped = window - 1 - (start - first_key)  # columns before the first key of the sequence
        yield slice(start, stop), slice(first_key, stop), slice(skipped, window - 1 + stop - start)


def _attend_all_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int, size: int, *, scale: float, dropout: float
) -> Tensor:
    """Attend from all blocks in one call, to copies of the keys in the band of each block."""
    batch, length = query.shape[:2]
    num_blocks = -(-length // size)
    blocks_before = -(-(window - 1) // size)  # number of earlier blocks that a query's band may reach
    end_padding = num_blocks * size - length

    def split_blocks(states: Tensor, zeros_before: int) -> Tensor:
        """(batch, length, heads, head_dim), with zeros added -> (batch, blocks, size, heads, head_dim)."""
        if zeros_before or end_padding:
            states = F.pad(states, (0, 0, 0, 0, zeros_before, end_padding))
        return states.unflatten(1, (-1, size))

    def blocks_in_band(states: Tensor) -> Tensor:
        """(batch * blocks, (blocks_before + 1) * size, ...): each block with the blocks before it."""
        blocks = split_blocks(states, blocks_before * size)
        shifted = [blocks[:, start : start + num_blocks] for start in range(blocks_before + 1)]
        return torch.cat(shifted, 2).flatten(0, 1)

    queries, keys, values = split_blocks(query, 0).flatten(0, 1), blocks_in_band(key), blocks_in_band(value)
    columns = torch.arange((blocks_before + 1) * size, device=query.device)
    block_numbers = torch.arange(num_blocks, device=query.device)[:, None, None]
    is_before_sequence = columns < (blocks_before - block_numbers) * size
    mask = _additive_mask(_outside_band(size, blocks_before * size, window, query.device) | is_before_sequence, query)
    mask = mask[:, None].repeat(batch, 1, 1, 1)
    context = scaled_dot_product_attention(queries, keys, values, mask, is_causal=False, scale=scale, dropout=dropout)
    return context.unflatten(0, (batch, num_blocks)).flatten(1, 2)[:, :length]


def _outside_band(size: int, num_before: int, window: int, device: torch.device) -> Tensor:
    """(size, num_before + size) bool, the keys from `num_before` before a block on that are outside a query's band."""
    keys = torch.arange(num_before + size, device=device)
    distance = torch.arange(size, device=device)[:, None] + num_before - keys
    return (distance < 0) | (distance >= window)


def _additive_mask(masked: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(masked.shape, dtype=like.dtype, device=like.device).masked_fill_(masked, float("-inf"))
