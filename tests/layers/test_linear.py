"""Linear layers by oneDNN equal torch's: values, gradients, second derivatives, and fallbacks to torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.cpu.linear import LinearLayers, can_use_onednn, fast_linear, linear, matmul_transposed

SHAPES = {"rows": (33, 16), "batch": (3, 5, 16), "one row": (16,), "few rows": (2, 16), "no row": (0, 16)}


@pytest.fixture(autouse=True)
def force_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN for products of any size."""
    monkeypatch.setattr(cpu_linear, "_MIN_MULTIPLICATIONS", 0)


def values_and_derivatives(apply: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Values, gradients, and gradients of the gradients' squares."""
    output = apply(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output**3 * weights).sum(), inputs, create_graph=True)
    second_derivatives = torch.autograd.grad(sum((gradient**2).sum() for gradient in gradients), inputs)
    return [output, *gradients, *second_derivatives]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_linear_equals_torch_in_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape), torch.randn(9, 16), *([torch.randn(9)] if bias else [])]
    expected = values_and_derivatives(F.linear, *(tensor.double().requires_grad_() for tensor in inputs))
    actual = values_and_derivatives(fast_linear, *(tensor.requires_grad_() for tensor in inputs))
    torch.testing.assert_close([value.double() for value in actual], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_gradients_only_where_required(frozen: int) -> None:
    inputs = [torch.randn(20, 16), torch.randn(9, 16), torch.randn(9)]
    for number, tensor in enumerate(inputs):
        tensor.requires_grad_(number != frozen)
    fast_linear(*inputs).sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [number == frozen for number in range(3)]


def test_views_and_transposes() -> None:
    left, right = torch.randn(16, 40).T, torch.randn(3, 9, 16)[1]
    torch.testing.assert_close(matmul_transposed(left, right), left @ right.T, atol=1e-5, rtol=1e-5)
    rows = torch.randn(4, 9, 16)[:, 2:7]
    torch.testing.assert_close(fast_linear(rows, right), F.linear(rows, right), atol=1e-5, rtol=1e-5)


def test_linear_layers_equal_torch_sequential() -> None:
    layers = [Linear(16, 9), torch.nn.Tanh(), Linear(9, 3)]
    fast_layers, torch_layers, batch = LinearLayers(*layers), torch.nn.Sequential(*layers), torch.randn(3, 7, 16)
    assert fast_layers.state_dict().keys() == torch_layers.state_dict().keys()
    torch.testing.assert_close(fast_layers(batch), torch_layers(batch), atol=1e-5, rtol=1e-5)


def test_output_range_of_layers_and_replacements() -> None:
    """Hooks, a replaced forward and an adapter also apply to a range of the outputs."""
    layer, batch = Linear(16, 9), torch.randn(3, 7, 16)
    full_output = layer(batch)[..., 3:7]
    torch.testing.assert_close(linear(layer, batch, 3, 7), full_output)
    hook = layer.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(linear(layer, batch, 3, 7), full_output + 1)
    hook.remove()
    adapter = torch.nn.Sequential(Linear(16, 4), Linear(4, 9))
    torch.testing.assert_close(linear(adapter, batch, 3, 7), adapter(batch)[..., 3:7])
    forward = layer.forward
    layer.forward = lambda input: 2 * forward(input)  # type: ignore[method-assign]
    torch.testing.assert_close(linear(layer, batch, 3, 7), 2 * full_output)


def test_half_precision_and_autocast_fall_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, batch = torch.randn(9, 16), torch.randn(20, 16)
    assert torch.equal(fast_linear(batch.bfloat16(), weight.bfloat16()), F.linear(batch.bfloat16(), weight.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_linear(batch, weight).dtype is torch.bfloat16
    monkeypatch.setattr(cpu_linear, "HAS_ONEDNN", False)
    assert not can_use_onednn(weight)
    assert torch.equal(fast_linear(batch, weight), F.linear(batch, weight))


def test_small_products_fall_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []

    def record_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append(len(left))
        return left @ right.T

    monkeypatch.setattr(cpu_linear, "_contiguous_linear", record_product)
    monkeypatch.setattr(cpu_linear, "_MIN_MULTIPLICATIONS", 20 * 16 * 9)
    for rows in (19, 20):
        fast_linear(torch.randn(rows, 16), torch.randn(9, 16))
    assert products == ([20] if cpu_linear.HAS_ONEDNN else [])


def test_compiled_layer_equals_eager() -> None:
    layer, batch = LinearLayers(Linear(16, 9)), torch.randn(20, 16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), layer(batch), atol=1e-5, rtol=1e-5)
