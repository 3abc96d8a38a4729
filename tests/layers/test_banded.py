"""Banded attention against a dense mask: values and gradients, as a function and within a layer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import assert_close

from hf_ctxmodels.layers.attention import backends
from hf_ctxmodels.layers.attention.backends import _attend_all_blocks, banded_attention
from hf_ctxmodels.layers.attention.layouts import PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.cpu.dropout import scaled_dot_product_attention


def dense(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    order = torch.arange(query.shape[1])
    distance = order[:, None] - order[None]
    mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return scaled_dot_product_attention(query, key, value, mask, is_causal=False, scale=0.3, dropout=0.0)


@pytest.mark.parametrize(("length", "window"), [(1, 1), (37, 5), (200, 1), (64, 64), (129, 65), (300, 128), (500, 200)])
def test_banded_equals_dense_mask(length: int, window: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, length, 3, 8, requires_grad=True) for _ in range(3)]
    expected = dense(*inputs, window)
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, weights)
    blockwise = banded_attention(*inputs, window, scale=0.3, dropout=0.0)
    single_call = _attend_all_blocks(*inputs, window, 64, scale=0.3, dropout=0.0)  # as on other devices
    assert type(single_call.grad_fn) is not type(blockwise.grad_fn)
    for context in (blockwise, single_call):
        assert_close(context, expected)
        assert_close(torch.autograd.grad(context, inputs, weights), expected_gradients)
    half_inputs = [tensor.detach().bfloat16() for tensor in inputs]
    half_output = banded_attention(*half_inputs, window, scale=0.3, dropout=0.0)
    assert half_output.dtype == torch.bfloat16
    assert_close(half_output.float(), expected, tolerance=3e-2)


def test_layer_uses_banded_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences of different lengths; those of at most two windows use a mask instead."""
    torch.manual_seed(0)
    calls: list[int] = []

    def record_call(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(len(tensors[0]))
        return banded_attention(*tensors, **options)

    monkeypatch.setattr(backends, "banded_attention", record_call)
    layer, spec = SelfAttention(24, 3), MaskSpec(causal=True, window=10)
    states, token_mask = torch.randn(4, 150, 24), torch.arange(150) < torch.tensor([150, 12, 149, 70])[:, None]
    packed = PackedLayout.build(4, 150, token_mask, None, states.device)
    context = packed.unpack(layer(packed.pack(states), packed, spec)[0])
    expected, probabilities = layer(states, PaddedLayout(4, 150, token_mask, implementation="eager"), spec)
    assert_close(context[token_mask], expected[token_mask])
    assert sum(calls) == 3
    assert (probabilities[0, 0, 100, 91:101] > 0).all()
    assert not probabilities[0, 0, 100, :91].any()
