"""Locally banded attention against a mask over all pairs: values and gradients, alone and within a layer."""

import pytest
import torch
from torch import Tensor

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
def test_equal_to_a_mask_over_all_pairs(length: int, window: int) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(2, length, 3, 8, requires_grad=True) for _ in range(3)]
    expected = dense(*rows, window)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, rows, weights)
    one_call = _attend_all_blocks(*rows, window, 64, scale=0.3, dropout=0.0)  # as on other devices
    for found in (banded_attention(*rows, window, scale=0.3, dropout=0.0), one_call):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for got, wanted in zip(torch.autograd.grad(found, rows, weights), gradients, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert type(one_call.grad_fn) is not type(banded_attention(*rows, window, scale=0.3, dropout=0.0).grad_fn)
    halves = [each.detach().bfloat16() for each in rows]
    half = banded_attention(*halves, window, scale=0.3, dropout=0.0)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=3e-2, rtol=3e-2)


def test_a_layer_computes_the_band_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of different lengths, packed; those of at most two windows by a mask."""
    torch.manual_seed(0)
    used = []
    monkeypatch.setattr(
        backends, "banded_attention", lambda *rows, **more: used.append(len(rows[0])) or banded_attention(*rows, **more)
    )
    layer, spec = SelfAttention(24, 3), MaskSpec(causal=True, window=10)
    lengths, width = (150, 12, 149, 70), 150
    states = torch.randn(4, width, 24)
    tokens = torch.arange(width) < torch.tensor(lengths)[:, None]
    packed = PackedLayout.build(4, width, tokens, None, states.device)
    found = packed.unpack(layer(packed.pack(states), packed, spec)[0])
    padded = PaddedLayout(4, width, tokens, implementation="eager")
    expected, weights = layer(states, padded, spec)
    torch.testing.assert_close(found[tokens], expected[tokens], atol=1e-5, rtol=1e-5)
    assert sum(used) == 3
    assert weights is not None
    assert bool((weights[0, 0, 100, 91:101] > 0).all())
    assert not bool(weights[0, 0, 100, :91].any())
