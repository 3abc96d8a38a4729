"""Dropout on the CPU: rate, scale, and the same mask in the forward and the backward pass."""

import pytest
import torch

from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.cpu.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rate_and_expectation(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out = dropout(torch.ones(400, 1001, dtype=dtype), p, training=True)
    remaining = out != 0
    deviation = (p * (1 - p) / out.numel()) ** 0.5
    assert remaining.double().mean().item() == pytest.approx(1 - p, abs=5 * deviation)
    assert out[remaining].unique().numel() == 1
    rounding = torch.finfo(dtype).eps  # of the scale
    assert out.double().mean().item() == pytest.approx(1, abs=5 * deviation / (1 - p) + rounding)


def test_elements_are_dropped_independently() -> None:
    torch.manual_seed(0)
    remaining = (dropout(torch.ones(4000, 64), 0.5, training=True) != 0).double()
    correlation = torch.corrcoef(remaining.T).fill_diagonal_(0)
    assert correlation.abs().max() < 0.09  # 5.7 standard deviations of 1/sqrt(4000)


def test_gradient_follows_the_mask() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 13, requires_grad=True)
    out = dropout(tensor, 0.3, training=True)
    out.backward(torch.ones_like(out))
    assert torch.allclose(tensor.grad * tensor.detach(), out.detach())
    assert tensor.grad.unique().tolist() == pytest.approx([0, 1 / 0.7], rel=1e-4)


def test_mask_depends_on_the_seed() -> None:
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dropout(torch.ones(50), 0.5, training=True)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


@pytest.mark.parametrize("numel", [0, 1, 3, 5])
def test_any_size(numel: int) -> None:
    assert dropout(torch.ones(numel), 0.5, training=True).shape == (numel,)


def test_identity_and_extremes() -> None:
    tensor = torch.randn(5)
    assert dropout(tensor, 0.5, training=False) is tensor
    assert dropout(tensor, 0.0, training=True) is tensor
    assert torch.equal(dropout(tensor, 1.0, training=True), torch.zeros(5))
    assert torch.equal(Dropout(0.5).eval()(tensor), tensor)


def test_attention_in_groups_has_dropout() -> None:
    """With values of 1 the context is the sum of the remaining probabilities, with mean 1 over samples."""
    torch.manual_seed(0)
    query, key = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    layout = PackedLayout.build(2, 5, mask, None, mask.device)

    def attended(value: torch.Tensor, rate: float) -> torch.Tensor:
        return attend(query, key, value, layout, scale=0.3, dropout=rate)[0]

    samples = torch.stack([attended(torch.ones(9, 2, 8), 0.2) for _ in range(600)])
    assert samples.mean().item() == pytest.approx(1, abs=0.02)
    assert samples.std().item() > 0.05
    value = torch.randn(9, 2, 8)
    assert torch.allclose(attended(value, 1e-4), attended(value, 0.0), atol=1e-3), "the rate is almost 0"
