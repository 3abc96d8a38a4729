"""Chunked cross-entropy equals the plain one, in values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.lm_loss import cross_entropy as prediction
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead, chunked_cross_entropy

ROWS, WIDTH, WORDS = 11, 8, 20


@pytest.fixture(params=[1, 3, 11, 100], ids=lambda rows: f"{rows}-rows-a-chunk")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of one row, of some, of all, and larger than there are rows."""
    monkeypatch.setattr(prediction, "CHUNK_ELEMENTS", request.param * WORDS)
    return request.param


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    offsets = torch.randn(WORDS, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offsets, torch.randint(WORDS, (rows,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction=reduction)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_and_gradients(reduction: str, bias: bool) -> None:
    *weights, targets = inputs(bias=bias)
    expected = plain(*weights, targets, reduction)
    got = chunked_cross_entropy(*weights, targets, reduction=reduction)
    torch.testing.assert_close(got, expected)
    leaves = [tensor for tensor in weights if tensor is not None]
    for one, other in zip(torch.autograd.grad(2.5 * got, leaves), torch.autograd.grad(2.5 * expected, leaves)):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("chunk")
def test_a_retained_graph_can_be_walked_again() -> None:
    *weights, targets = inputs()
    loss = chunked_cross_entropy(*weights, targets)
    first = [grad.clone() for grad in torch.autograd.grad(3 * loss, weights, retain_graph=True)]
    for one, other in zip(first, torch.autograd.grad(loss, weights), strict=True):
        torch.testing.assert_close(one, 3 * other)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {1, 2}, {0, 1}])
def test_frozen_parts_get_no_gradient(frozen: set[int]) -> None:
    *weights, targets = inputs()
    weights = [tensor.detach() if place in frozen else tensor for place, tensor in enumerate(weights)]
    chunked_cross_entropy(*weights, targets).backward()
    got = [tensor.grad for tensor in weights]
    for tensor in weights:
        tensor.grad = None
    plain(*weights, targets, "mean").backward()
    for place, tensor in enumerate(weights):
        if place in frozen:
            assert got[place] is None
        else:
            torch.testing.assert_close(got[place], tensor.grad)


@pytest.mark.usefixtures("chunk")
def test_without_gradients() -> None:
    *weights, targets = inputs()
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(*weights, targets), plain(*weights, targets, "mean"))


def test_no_rows() -> None:
    *weights, targets = inputs(rows=0)
    for reduction in ("mean", "sum"):
        loss = chunked_cross_entropy(*weights, targets, reduction=reduction)
        assert loss == 0
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, weights))


@pytest.mark.usefixtures("chunk")
def test_large_logits_do_not_overflow() -> None:
    *weights, targets = inputs()
    weights = [(tensor * 300).detach().requires_grad_() for tensor in weights]
    got, expected = chunked_cross_entropy(*weights, targets), plain(*weights, targets, "mean")
    torch.testing.assert_close(got, expected)
    for one, other in zip(torch.autograd.grad(got, weights), torch.autograd.grad(expected, weights)):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("chunk")
def test_bfloat16() -> None:
    """The loss is summed in single precision; gradients keep the type of what they belong to."""
    *weights, targets = inputs(dtype=torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in weights]
    got, expected = chunked_cross_entropy(*weights, targets), plain(*exact, targets, "mean")
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)
    for one, other in zip(torch.autograd.grad(got, weights), torch.autograd.grad(expected, exact)):
        assert one.dtype is torch.bfloat16
        assert (one.float() - other).norm() < 0.03 * other.norm()


@pytest.mark.usefixtures("chunk")
def test_autocast() -> None:
    """Products in bfloat16, everything that is summed in single precision, as autocast has it."""
    *weights, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        got = chunked_cross_entropy(*weights, targets)
        logits = F.linear(*weights)
    assert logits.dtype is torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets)
    torch.testing.assert_close(got, expected)
    for one, other in zip(torch.autograd.grad(got, weights), torch.autograd.grad(expected, weights)):
        assert one.dtype is torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.usefixtures("chunk")
def test_gradients_by_finite_differences() -> None:
    *weights, targets = inputs(rows=5, dtype=torch.float64)
    weights = [(tensor / 4).detach().requires_grad_() for tensor in weights]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, bias, targets, reduction="sum")

    # the sum itself is kept in single precision, so the steps are coarse
    assert torch.autograd.gradcheck(loss, weights, eps=1e-2, atol=2e-3, rtol=1e-2)


def test_head_loss_is_cross_entropy_of_its_logits() -> None:
    torch.manual_seed(0)
    head = MaskedLMHead(6, WIDTH, WORDS, activation="gelu", layer_norm_eps=1e-5)
    states, targets = torch.randn(4, 6), torch.randint(WORDS, (4,))
    expected = F.cross_entropy(head(states), targets, reduction="sum")
    torch.testing.assert_close(head.summed_loss(states, targets), expected)
    assert head(torch.randn(2, 3, 6)).shape == (2, 3, WORDS)
