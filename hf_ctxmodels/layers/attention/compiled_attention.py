"""Attention of packed tokens in compiled graphs: operators whose implementations call `prepare_mask` and `attend`."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.core.compiled_ops import data_dependent_size, define_differentiable_operator
from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import PackedLayout, TracedLayout
from hf_ctxmodels.layers.attention.masks import MaskSpec, PackedMask, TracedMask, gather_position_bias, prepare_mask

_MASK_TENSORS = (
    "Tensor lengths, Tensor? computed, Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths, "
    "Tensor? ranges"
)
_MASK_OPTIONS = "bool causal, int? window"


def attend_traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TracedLayout,
    mask: TracedMask,
    *,
    scale: float,
    dropout: float,
    key_layout: TracedLayout | None = None,
) -> Tensor:
    """`attend` for a traced layout."""
    arguments = _mask_arguments(mask.spec, layout, key_layout)
    return _packed_attention(query, key, value, mask.masks_with_bias, *arguments, scale, dropout)


def masks_with_bias(
    spec: MaskSpec, layout: TracedLayout, key_layout: TracedLayout | None, device: torch.device
) -> Tensor:
    """(elements,) `PackedMask.concatenated_masks` of a spec with a bias, which all layers share."""
    bias: Any = spec.bias
    return _masks_with_bias(bias.by_distance(device), *_mask_arguments(spec, layout, key_layout))


def _mask_arguments(spec: MaskSpec, layout: TracedLayout, key_layout: TracedLayout | None) -> tuple:
    """Arguments `_MASK_TENSORS` and `_MASK_OPTIONS` of an operator."""
    key_lengths = None if key_layout is None else key_layout.lengths
    tensors = layout.lengths, layout.query, layout.query_lengths, key_lengths, spec.prefix_lengths, spec.ranges
    return *tensors, spec.causal, spec.window


def _attend(
    query: Tensor, key: Tensor, value: Tensor, masks_with_bias: Tensor | None, *mask_scale_and_dropout: Any
) -> Tensor:
    *mask_arguments, scale, dropout = mask_scale_and_dropout
    mask = _prepare_mask(query, None, *mask_arguments)
    if masks_with_bias is not None:
        mask = replace(mask, masks_with_bias=masks_with_bias)
    return attend(query, key, value, mask.queries, mask, scale=scale, dropout=dropout)[0]


def _concatenate_masks(bias_by_distance: Tensor, *mask_arguments: Any) -> Tensor:
    return _prepare_mask(bias_by_distance, bias_by_distance, *mask_arguments).concatenated_masks()


def _prepare_mask(
    like: Tensor,
    bias_by_distance: Tensor | None,
    lengths: Tensor,
    computed: Tensor | None,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    window: int | None,
) -> PackedMask:
    layout = _packed_layout(lengths, computed, query_lengths)
    key_layout = layout if key_lengths is None else _packed_layout(key_lengths)
    if all(tensor is None for tensor in (bias_by_distance, computed, prefix_lengths, ranges)):
        options = causal, window, like.dtype, like.device, torch.get_num_threads(), torch.is_inference_mode_enabled()
        return _cached_mask(layout.lengths, key_layout.lengths, *options)
    bias = None if bias_by_distance is None else partial(gather_position_bias, bias_by_distance)
    mask: Any = prepare_mask(MaskSpec(causal, prefix_lengths, window, bias, ranges), layout, like, key_layout)
    return mask


@lru_cache(maxsize=4)
def _cached_mask(
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    is_inference: bool,
) -> PackedMask:
    """The prepared mask, which all layers share; the groups depend on `num_threads`, and masks of inference mode
    (`is_inference`) cannot be used with gradients."""
    queries, keys = (
        PackedLayout(len(lengths), 0, None, lengths, torch.tensor(lengths)) for lengths in (query_lengths, key_lengths)
    )
    like = torch.empty(0, dtype=dtype, device=device)
    mask: Any = prepare_mask(MaskSpec(causal, window=window), queries, like, keys)
    return mask


def _packed_layout(
    lengths: Tensor, computed: Tensor | None = None, query_lengths: Tensor | None = None
) -> PackedLayout:
    """The layout for `attend`, which reads the lengths only."""
    counts = () if query_lengths is None else tuple(query_lengths.tolist())
    return PackedLayout(len(lengths), 0, None, tuple(lengths.tolist()), lengths, computed, counts)


_packed_attention = define_differentiable_operator(
    "packed_attention",
    f"Tensor query, Tensor key, Tensor value, Tensor? masks_with_bias, {_MASK_TENSORS}, {_MASK_OPTIONS}, "
    "float scale, float dropout",
    _attend,
    lambda query, *inputs: query.new_empty(query.shape),
    num_differentiable=4,
)

_masks_with_bias = define_differentiable_operator(
    "masks_with_bias",
    f"Tensor bias_by_distance, {_MASK_TENSORS}, {_MASK_OPTIONS}",
    _concatenate_masks,
    lambda bias_by_distance, *inputs: bias_by_distance.new_empty(data_dependent_size()),
    num_differentiable=1,
)
