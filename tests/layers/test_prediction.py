"""Chunked cross-entropy equals torch's, in values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.lm_loss import cross_entropy
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy

ROWS, WIDTH, VOCAB_SIZE = 11, 8, 20
pytestmark = pytest.mark.usefixtures("chunk_rows")


@pytest.fixture(params=[1, 3, 11, 100], ids=lambda rows: f"{rows} rows")
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row, of several, of all, and larger than the input."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", request.param * VOCAB_SIZE)


def make_inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[list, Tensor]:
    """Hidden states, weight and bias; and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, WIDTH), (VOCAB_SIZE, WIDTH), (VOCAB_SIZE,)]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [*leaves[:2], leaves[2] if bias else None], torch.randint(VOCAB_SIZE, (rows,), generator=generator)


def naive_cross_entropy(leaves: list, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(*leaves), targets, reduction="sum")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1, 300], ids=["small logits", "large logits"])
def test_chunked_cross_entropy_equals_torch(bias: bool, scale: int) -> None:
    """Large logits do not overflow."""
    leaves, targets = make_inputs(bias=bias)
    leaves = [None if tensor is None else (tensor * scale).detach().requires_grad_() for tensor in leaves]
    expected = naive_cross_entropy(leaves, targets)
    actual = chunked_cross_entropy(*leaves, targets)
    torch.testing.assert_close(actual, expected)
    tensors = [tensor for tensor in leaves if tensor is not None]
    tolerance = {} if scale == 1 else {"atol": 1e-3, "rtol": 1e-4}
    gradients = [torch.autograd.grad(2.5 * loss, tensors) for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(*leaves, targets), expected)


def test_second_backward_of_retained_graph() -> None:
    leaves, targets = make_inputs()
    loss = chunked_cross_entropy(*leaves, targets)
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, leaves), tuple(3 * gradient for gradient in gradients))


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {1, 2}, {0, 1}], ids=str)
def test_frozen_inputs_get_no_gradient(frozen: set[int]) -> None:
    leaves, targets = make_inputs()
    leaves = [tensor.detach() if number in frozen else tensor for number, tensor in enumerate(leaves)]
    gradients = []
    for loss in (chunked_cross_entropy(*leaves, targets), naive_cross_entropy(leaves, targets)):
        loss.backward()
        gradients.append([tensor.grad for tensor in leaves])
        for tensor in leaves:
            tensor.grad = None
    torch.testing.assert_close(*gradients)


def test_zero_rows_have_zero_loss_and_gradients() -> None:
    leaves, targets = make_inputs(rows=0)
    loss = chunked_cross_entropy(*leaves, targets)
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))


def test_bfloat16_inputs() -> None:
    """The loss is summed in float32; gradients have the type of their tensors."""
    leaves, targets = make_inputs(dtype=torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in leaves]
    actual, expected = chunked_cross_entropy(*leaves, targets), naive_cross_entropy(exact, targets)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, exact), strict=True
    ):
        assert gradient.dtype is torch.bfloat16
        assert (gradient.float() - expected_gradient).norm() < 0.03 * expected_gradient.norm()


def test_autocast_equals_torch_operators() -> None:
    """Products are computed in bfloat16, sums in float32, as with torch's operators."""
    leaves, targets = make_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        actual, logits = chunked_cross_entropy(*leaves, targets), F.linear(*leaves)
    assert logits.dtype is torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets, reduction="sum")
    torch.testing.assert_close(actual, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert gradient.dtype is torch.float32
        assert (gradient - expected_gradient).norm() < 0.02 * expected_gradient.norm()
