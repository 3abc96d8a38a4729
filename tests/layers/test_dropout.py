"""Dropout of activations and of attention probabilities on the CPU: rate, scale, gradients, shared masks."""

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.cpu.dropout import Dropout, attention_with_dropout, dropout, shared_dropout

SCALE = 0.3
GROUPS = torch.tensor([[0, 1, 2, 0, 0, 1]])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rate_and_expectation(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out = dropout(torch.ones(400, 1001, dtype=dtype), p, training=True)
    is_kept = out != 0
    deviation = (p * (1 - p) / out.numel()) ** 0.5
    assert is_kept.double().mean().item() == pytest.approx(1 - p, abs=5 * deviation)
    assert out[is_kept].unique().numel() == 1
    rounding = torch.finfo(dtype).eps  # of the scale
    assert out.double().mean().item() == pytest.approx(1, abs=5 * deviation / (1 - p) + rounding)


def test_elements_are_dropped_independently() -> None:
    torch.manual_seed(0)
    is_kept = (dropout(torch.ones(4000, 64), 0.5, training=True) != 0).double()
    correlation = torch.corrcoef(is_kept.T).fill_diagonal_(0)
    assert correlation.abs().max() < 0.09  # 5.7 standard deviations of 1/sqrt(4000)


def test_gradient_uses_dropout_mask() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 13, requires_grad=True)
    out = dropout(tensor, 0.3, training=True)
    out.backward(torch.ones_like(out))
    assert torch.allclose(tensor.grad * tensor.detach(), out.detach())
    assert tensor.grad.unique().tolist() == pytest.approx([0, 1 / 0.7], rel=1e-4)


def test_no_dropout_and_full_dropout() -> None:
    for numel in (0, 1, 3):
        assert dropout(torch.ones(numel), 0.5, training=True).shape == (numel,)
    tensor = torch.randn(5)
    assert dropout(tensor, 0.5, training=False) is tensor
    assert dropout(tensor, 0.0, training=True) is tensor
    assert torch.equal(dropout(tensor, 1.0, training=True), torch.zeros(5))
    assert torch.equal(Dropout(0.5).eval()(tensor), tensor)
    states = torch.randn(1, 2, 3, 4)
    assert attention_with_dropout(states, states, states, None, scale=1.0, dropout=1 - 1e-6).isfinite().all()


def test_grouped_attention_applies_dropout() -> None:
    """With values of 1, the context is the sum of the kept probabilities, whose mean over samples is 1."""
    torch.manual_seed(0)
    query, key = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    layout = PackedLayout.build(2, 5, mask, None, mask.device)

    def run_attention(value: torch.Tensor, rate: float) -> torch.Tensor:
        return attend(query, key, value, layout, scale=0.3, dropout=rate)[0]

    samples = torch.stack([run_attention(torch.ones(9, 2, 8), 0.2) for _ in range(600)])
    assert samples.mean().item() == pytest.approx(1, abs=0.02)
    assert samples.std().item() > 0.05
    value = torch.randn(9, 2, 8)
    assert torch.allclose(run_attention(value, 1e-4), run_attention(value, 0.0), atol=1e-3), "the rate is almost 0"


def attention_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Views of one (batch, length, 3, heads, head_dim) buffer, the output of a fused projection."""
    fused = torch.randn(2, 7, 3, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return fused, *(tensor.transpose(1, 2) for tensor in fused.unbind(2))


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    scores = (query * SCALE) @ key.transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    return dropout(torch.softmax(scores, -1), rate, training=True) @ value


@pytest.mark.parametrize("rate", [0.1, 0.6])
@pytest.mark.parametrize("mask_name", ["none", "padding", "shared bias", "bias of each example"])
def test_attention_equals_naive_reference(rate: float, mask_name: str) -> None:
    """Values and gradients, also of a bias, with the same dropout mask."""
    fused, query, key, value = attention_inputs()
    mask, leaves = None, [fused]
    if mask_name == "padding":
        mask = torch.zeros(2, 1, 1, 7)
        mask[1, ..., 4:] = float("-inf")
    elif mask_name != "none":
        batch = 1 if mask_name == "shared bias" else 2
        mask = torch.randn(batch, 4, 7, 7, generator=torch.Generator().manual_seed(batch)).requires_grad_()
        leaves.append(mask)
    torch.manual_seed(3)
    expected = naive_attention(query, key, value, mask, rate)
    torch.manual_seed(3)
    actual = attention_with_dropout(query, key, value, mask, scale=SCALE, dropout=rate)
    assert actual.transpose(1, 2).is_contiguous(), "the layout of the output projection's input"
    torch.testing.assert_close(actual, expected)
    losses = ((context * torch.arange(6)).sum() for context in (actual, expected))
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses))


def test_attention_in_bfloat16_is_close_to_float32() -> None:
    """Half-precision inputs, as under autocast, with the softmax in float32."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        fused, query, key, value = attention_inputs(dtype)
        torch.manual_seed(3)
        context = attention_with_dropout(query, key, value, None, scale=SCALE, dropout=0.1)
        assert context.dtype is dtype
        (gradient,) = torch.autograd.grad(context.float().square().sum(), fused)
        results.append((context.float(), gradient.float()))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("drop_rows", [True, False])
def test_rows_of_group_share_dropout_mask(drop_rows: bool) -> None:
    torch.manual_seed(0)
    tensor = torch.ones(1, 6, 400, requires_grad=True)
    out = shared_dropout(tensor, GROUPS, 3, 0.5, True, drop_rows=drop_rows)
    assert torch.equal(out[0, 0], out[0, 3])
    assert torch.equal(out[0, 1], out[0, 5])
    assert set(out.unique().tolist()) <= {0.0, 2.0}
    if drop_rows:
        assert all(len(row.unique()) == 1 for row in out[0])
    else:
        assert not torch.equal(out[0, 0], out[0, 1])
        assert 0.4 < (out == 0).float().mean() < 0.6
    out.sum().backward()
    assert torch.equal(tensor.grad, out.detach())
    assert shared_dropout(tensor, GROUPS, 3, 0.5, False, drop_rows=drop_rows) is tensor


def test_rate_of_dropped_rows() -> None:
    torch.manual_seed(0)
    out = shared_dropout(torch.ones(20_000, 2), torch.arange(20_000), 20_000, 0.1, True, drop_rows=True)
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.011)
    assert out.mean().item() == pytest.approx(1, abs=0.012)
