"""Attention of packed tokens in compiled graphs: operators whose implementations call `prepare_mask` and `attend`."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_ctxmodels.core.compiled_ops import define_differentiable_operator
from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import TracedLayout
from hf_ctxmodels.layers.attention.prepared_masks import (
    MASK_OPTIONS,
    MASK_TENSORS,
    TracedMask,
    mask_arguments,
    prepare_mask_of_lengths,
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
    arguments = mask_arguments(mask.spec, layout, key_layout)
    return _packed_attention(query, key, value, mask.masks_with_bias, *arguments, scale, dropout)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, masks_with_bias: Tensor | None, *mask_scale_and_dropout: Any
) -> Tensor:
    *mask_arguments, scale, dropout = mask_scale_and_dropout
    mask = prepare_mask_of_lengths(query, None, *mask_arguments)
    if masks_with_bias is not None:
        mask = replace(mask, masks_with_bias=masks_with_bias)
    return attend(query, key, value, mask.queries, mask, scale=scale, dropout=dropout)[0]


_packed_attention = define_differentiable_operator(
    "packed_attention",
    f"Tensor query, Tensor key, Tensor value, Tensor? masks_with_bias, {MASK_TENSORS}, {MASK_OPTIONS}, "
    "float scale, float dropout",
    _attend,
    lambda query, *inputs: query.new_empty(query.shape),
    num_differentiable=4,
)
