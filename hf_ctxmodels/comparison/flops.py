"""Floating-point operations, counted by torch, with the operators that its counter lacks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def flop_counter() -> FlopCounterMode:
    """A context that counts the operations of matrix products and attention, on CPUs and GPUs.

    A multiplication and an addition are two operations; elementwise functions do not count. Not counted: training
    outside of torch's operators, as of word vectors.
    """
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten.addmm_: _sum_and_product,
        torch.ops.aten.baddbmm_: _sum_and_product,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        torch.ops.aten._cudnn_rnn: _recurrent_layers,
        torch.ops.aten._cudnn_rnn_backward: _recurrent_layers_backward,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        formulas[torch.ops.mkldnn._linear_pointwise] = _linear
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _linear(input_shape: Shape, weight_shape: Shape, *args: Any, **kwargs: Any) -> int:
    """Product of (..., in) and (out, in)."""
    return 2 * math.prod(input_shape) * weight_shape[0]


def _sum_and_product(sum_shape: Shape, left: Shape, right: Shape, *args: Any, **kwargs: Any) -> int:
    """Product of (..., rows, in) and (..., in, columns)."""
    return 2 * math.prod(left) * right[-1]


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _recurrent_layers(input_shape: Shape, weight_shapes: Sequence[Shape], *args: Any, **kwargs: Any) -> int:
    """Products of (..., tokens, in) with all matrices of the layers."""
    tokens = math.prod(input_shape[:-1])
    return 2 * tokens * sum(math.prod(shape) for shape in weight_shapes if len(shape) == 2)


def _recurrent_layers_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent_layers(*args, **kwargs)
