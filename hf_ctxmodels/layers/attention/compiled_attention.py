"""Attention of packed tokens in compiled graphs: one operator, whose implementation calls `attend`."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from hf_ctxmodels.core.compiled_ops import define_differentiable_operator
from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import PackedLayout, TracedLayout
from hf_ctxmodels.layers.attention.masks import AttentionMask, MaskSpec, TracedMask, gather_position_bias, prepare_mask

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias_by_distance, Tensor lengths, Tensor? computed, "
    "Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths, Tensor? ranges, bool causal, "
    "int? window, float scale, float dropout"
)


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
    spec = mask.spec
    return _packed_attention(
        query,
        key,
        value,
        mask.bias_by_distance,
        layout.lengths,
        layout.query,
        layout.query_lengths,
        None if key_layout is None else key_layout.lengths,
        spec.prefix_lengths,
        spec.ranges,
        spec.causal,
        spec.window,
        scale,
        dropout,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_by_distance: Tensor | None,
    lengths: Tensor,
    computed: Tensor | None,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    layout = _packed_layout(lengths, computed, query_lengths)
    key_layout = layout if key_lengths is None else _packed_layout(key_lengths)
    mask: AttentionMask
    if all(tensor is None for tensor in (bias_by_distance, computed, prefix_lengths, ranges)):
        options = causal, window, query.dtype, query.device, torch.get_num_threads(), torch.is_inference_mode_enabled()
        mask = _cached_mask(layout.lengths, key_layout.lengths, *options)
    else:
        bias = None if bias_by_distance is None else partial(gather_position_bias, bias_by_distance)
        mask = MaskSpec(causal, prefix_lengths, window, bias, ranges)
    return attend(query, key, value, layout, mask, scale=scale, dropout=dropout, key_layout=key_layout)[0]


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
) -> AttentionMask:
    """The prepared mask, which all layers share; the groups depend on `num_threads`, and masks of inference mode
    (`is_inference`) cannot be used with gradients."""
    queries, keys = (
        PackedLayout(len(lengths), 0, None, lengths, torch.tensor(lengths)) for lengths in (query_lengths, key_lengths)
    )
    return prepare_mask(MaskSpec(causal, window=window), queries, torch.empty(0, dtype=dtype, device=device), keys)


def _packed_layout(
    lengths: Tensor, computed: Tensor | None = None, query_lengths: Tensor | None = None
) -> PackedLayout:
    """The layout for `attend`, which reads the lengths only."""
    counts = () if query_lengths is None else tuple(query_lengths.tolist())
    return PackedLayout(len(lengths), 0, None, tuple(lengths.tolist()), lengths, computed, counts)


_packed_attention = define_differentiable_operator("packed_attention", _ARGUMENTS, _attend, num_differentiable=4)
