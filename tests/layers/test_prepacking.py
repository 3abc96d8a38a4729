"""Copies of weights in oneDNN's order: the same products, made when they pay, never of what has changed."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.cpu.linear import active_prepacked_weights, linear, prepacked_weights

pytestmark = pytest.mark.skipif(not cpu_linear.HAS_ONEDNN, reason="this torch has no oneDNN")
USES = cpu_linear._PREPACK_AFTER + 1
ROWS = 4


@pytest.fixture
def map_of() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40)


def _copies() -> int:
    weights = active_prepacked_weights()
    return 0 if weights is None else sum(use.prepacked is not None for use in weights._uses.values())


def _apply(
    linear_map: nn.Linear, times: int, rows: int = ROWS, dtype: torch.dtype = torch.float32, **part: int
) -> None:
    with torch.no_grad():
        for _ in range(times):
            given = torch.randn(rows, linear_map.in_features, dtype=dtype)
            expected = linear_map(given)[..., part.get("start") : part.get("stop")]
            torch.testing.assert_close(linear(linear_map, given, **part), expected)


def test_a_copy_is_made_when_it_pays(map_of: nn.Linear) -> None:
    with prepacked_weights():
        _apply(map_of, cpu_linear._PREPACK_AFTER)
        assert _copies() == 0
        _apply(map_of, 2)
        assert _copies() == 1
    _apply(map_of, 1)


def test_products_by_the_copy_are_those_of_the_weight(map_of: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad(), prepacked_weights():
        _apply(map_of, USES)
        monkeypatch.setattr(cpu_linear, "linear", None)  # another way would fail
        given = torch.randn(2, 3, 24)
        torch.testing.assert_close(linear(map_of, given), map_of(given))
        without = nn.Linear(24, 40, bias=False)
        without.weight = map_of.weight
        torch.testing.assert_close(linear(without, given), without(given))


def test_ranges_have_copies_of_their_own(map_of: nn.Linear) -> None:
    with prepacked_weights():
        _apply(map_of, USES)
        _apply(map_of, USES, start=0, stop=16)
        _apply(map_of, USES, start=16, stop=40)
        assert _copies() == 3


def test_copies_have_a_limit(map_of: nn.Linear) -> None:
    other, size = nn.Linear(24, 40), 24 * 40 * 4
    with prepacked_weights(2 * size - 1):
        _apply(map_of, USES)
        _apply(other, USES)
        assert _copies() == 1
        with torch.no_grad():
            map_of.weight.mul_(2.0)
        _apply(map_of, 1)  # its copy is of no use any more, and makes room
        _apply(other, 1)
        assert active_prepacked_weights().get(other.weight, None, None, 1) is not None
        assert active_prepacked_weights().get(map_of.weight, None, None, 1) is None


def test_many_rows_need_no_copy(map_of: nn.Linear) -> None:
    with prepacked_weights():
        _apply(map_of, USES, rows=cpu_linear._MAX_PREPACKED_ROWS + 1)
        assert not active_prepacked_weights()._uses


def test_changed_weights_are_copied_anew(map_of: nn.Linear) -> None:
    with prepacked_weights():
        _apply(map_of, USES)
        with torch.no_grad():
            map_of.weight.mul_(2.0)
        _apply(map_of, USES)
        map_of.weight.data = torch.randn(40, 24)
        _apply(map_of, USES)
        map_of.weight = nn.Parameter(torch.randn(40, 24))
        _apply(map_of, USES)
        assert _copies() == 2  # of each parameter one


def test_gradients_pass_by_the_copies(map_of: nn.Linear) -> None:
    with prepacked_weights():
        _apply(map_of, USES)
        given = torch.randn(ROWS, 24, requires_grad=True)
        linear(map_of, given).sum().backward()
    torch.testing.assert_close(given.grad, map_of.weight.sum(0).expand(ROWS, -1))
    torch.testing.assert_close(map_of.bias.grad, torch.full((40,), float(ROWS)))


def test_a_bias_alone_gets_its_gradient(map_of: nn.Linear) -> None:
    map_of.weight.requires_grad_(False)
    with prepacked_weights():
        _apply(map_of, USES)
        linear(map_of, torch.randn(ROWS, 24)).sum().backward()
    torch.testing.assert_close(map_of.bias.grad, torch.full((40,), float(ROWS)))


@pytest.mark.skipif(not cpu_linear.HAS_BFLOAT16_PRODUCT, reason="this CPU has no products in bfloat16")
def test_half_precision_has_copies(map_of: nn.Linear) -> None:
    map_of.to(torch.bfloat16)
    with prepacked_weights():
        _apply(map_of, USES, dtype=torch.bfloat16)
        assert _copies() == 1


def test_weights_made_in_inference_mode_have_none() -> None:
    with torch.inference_mode():
        made = nn.Linear(24, 40)
        with prepacked_weights():
            _apply(made, USES)
            assert _copies() == 0


def test_blocks_within_each_other_share_copies_and_the_last_frees_them(map_of: nn.Linear) -> None:
    with prepacked_weights():
        outer = active_prepacked_weights()
        with prepacked_weights():
            _apply(map_of, USES)
            assert active_prepacked_weights() is outer
        with prepacked_weights(0):
            assert active_prepacked_weights() is None
        assert _copies() == 1
        kept = weakref.ref(outer)
        del outer
    gc.collect()
    assert active_prepacked_weights() is None
    assert kept() is None


def test_forward_derivatives_pass_by_the_copies(map_of: nn.Linear) -> None:
    """Neither the copy nor the product of much work knows them, and would return none."""
    map_of.requires_grad_(False)
    wide = nn.Linear(512, 512).requires_grad_(False)
    with prepacked_weights(), forward_ad.dual_level():
        for each in (map_of, wide):
            _apply(each, USES)
            tangent = torch.randn(16, each.in_features)
            given = forward_ad.make_dual(torch.randn(16, each.in_features), tangent)
            _, found = forward_ad.unpack_dual(linear(each, given))
            torch.testing.assert_close(found, tangent @ each.weight.T)


@pytest.mark.skipif(not cpu_linear.HAS_BFLOAT16_PRODUCT, reason="this CPU has no products in bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_says_the_type_of_a_product(map_of: nn.Linear, dtype: torch.dtype) -> None:
    map_of.to(torch.bfloat16)
    given = torch.randn(ROWS, 24, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype), prepacked_weights():
        assert {linear(map_of, given).dtype for _ in range(USES)} == {dtype}
