"""Prepacked weights: equal products, copies only where they pay off, and none of outdated weights."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.cpu.linear import active_prepacked_weights, linear, prepacked_weights

pytestmark = pytest.mark.skipif(not cpu_linear.HAS_ONEDNN, reason="this torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not cpu_linear.HAS_BFLOAT16_PRODUCT, reason="this CPU has no products in bfloat16")
USES, ROWS = cpu_linear._PREPACK_AFTER + 1, 4


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40)


def count_copies() -> int:
    return sum(use.prepacked is not None for use in active_prepacked_weights()._uses.values())


def check_products(layer: nn.Linear, times: int = USES, rows: int = ROWS, **output_range: int) -> None:
    """Compare products with torch's."""
    with torch.no_grad():
        for _ in range(times):
            inputs = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
            expected = layer(inputs)[..., output_range.get("start") : output_range.get("stop")]
            torch.testing.assert_close(linear(layer, inputs, **output_range), expected)


def test_weight_is_copied_after_several_products(layer: nn.Linear) -> None:
    with prepacked_weights():
        check_products(layer, cpu_linear._PREPACK_AFTER)
        assert count_copies() == 0
        check_products(layer, 2)
        assert count_copies() == 1
    check_products(layer, 1)


def test_products_with_prepacked_weight(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad(), prepacked_weights():
        check_products(layer)
        monkeypatch.setattr(cpu_linear, "fast_linear", None)  # would be called without a copy
        inputs = torch.randn(2, 3, 24)
        torch.testing.assert_close(linear(layer, inputs), layer(inputs))
        without_bias = nn.Linear(24, 40, bias=False)
        without_bias.weight = layer.weight
        torch.testing.assert_close(linear(without_bias, inputs), without_bias(inputs))


def test_output_ranges_have_separate_copies(layer: nn.Linear) -> None:
    with prepacked_weights():
        for output_range in ({}, {"start": 0, "stop": 16}, {"start": 16, "stop": 40}):
            check_products(layer, **output_range)
        assert count_copies() == 3


def test_total_size_of_copies_is_limited(layer: nn.Linear) -> None:
    other_layer, size = nn.Linear(24, 40), 24 * 40 * 4
    with prepacked_weights(2 * size - 1):
        check_products(layer)
        check_products(other_layer)
        assert count_copies() == 1
        with torch.no_grad():
            layer.weight.mul_(2.0)
        check_products(layer, 1)  # frees its outdated copy
        check_products(other_layer, 1)
        assert active_prepacked_weights().get(other_layer.weight, None, None, 1) is not None
        assert active_prepacked_weights().get(layer.weight, None, None, 1) is None


def test_many_rows_use_no_copy(layer: nn.Linear) -> None:
    with prepacked_weights():
        check_products(layer, rows=cpu_linear._MAX_PREPACKED_ROWS + 1)
        assert not active_prepacked_weights()._uses


def test_changed_weights_are_copied_again(layer: nn.Linear) -> None:
    with prepacked_weights():
        check_products(layer)
        with torch.no_grad():
            layer.weight.mul_(2.0)
        check_products(layer)
        layer.weight.grad = torch.ones_like(layer.weight)
        torch.optim.AdamW([layer.weight], 1.0, fused=True).step()  # which does not increment the version
        check_products(layer)
        layer.weight.data = torch.randn(40, 24)
        check_products(layer)
        layer.weight = nn.Parameter(torch.randn(40, 24))
        check_products(layer)
        assert count_copies() == 2, "one of each parameter"


@pytest.mark.parametrize("frozen_weight", [False, True])
def test_gradients_use_no_copies(layer: nn.Linear, frozen_weight: bool) -> None:
    layer.weight.requires_grad_(not frozen_weight)
    inputs = torch.randn(ROWS, 24, requires_grad=not frozen_weight)
    with prepacked_weights():
        check_products(layer)
        linear(layer, inputs).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((40,), float(ROWS)))
    if not frozen_weight:
        torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(ROWS, -1))


def test_forward_mode_derivatives_use_no_copies(layer: nn.Linear) -> None:
    """oneDNN has no forward-mode derivatives, with or without a copy."""
    with prepacked_weights(), forward_ad.dual_level():
        for module in (layer.requires_grad_(False), nn.Linear(512, 512).requires_grad_(False)):
            check_products(module)
            tangent = torch.randn(16, module.in_features)
            inputs = forward_ad.make_dual(torch.randn(16, module.in_features), tangent)
            _, derivative = forward_ad.unpack_dual(linear(module, inputs))
            torch.testing.assert_close(derivative, tangent @ module.weight.T)


def test_weights_created_in_inference_mode_are_not_copied() -> None:
    with torch.inference_mode(), prepacked_weights():
        check_products(nn.Linear(24, 40))
        assert count_copies() == 0


@needs_bfloat16
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16])
def test_half_precision(layer: nn.Linear, autocast_dtype: Any) -> None:
    """Weights in bfloat16 are copied; autocast determines the dtype of a product."""
    layer.to(torch.bfloat16)
    inputs, dtype = torch.randn(ROWS, 24, dtype=torch.bfloat16), autocast_dtype or torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast_dtype is not None), prepacked_weights():
        assert {linear(layer, inputs).dtype for _ in range(USES)} == {dtype}
        if autocast_dtype is None:
            check_products(layer)
            assert count_copies() == 1


def test_nested_contexts_share_copies(layer: nn.Linear) -> None:
    with prepacked_weights():
        outer = active_prepacked_weights()
        with prepacked_weights():
            check_products(layer)
            assert active_prepacked_weights() is outer
        with prepacked_weights(0):
            assert active_prepacked_weights() is None
        assert count_copies() == 1
        reference = weakref.ref(outer)
        del outer
    gc.collect()
    assert active_prepacked_weights() is None
    assert reference() is None
