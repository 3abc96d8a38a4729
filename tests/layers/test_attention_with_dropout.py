"""Attention with dropout on the CPU equals the formula with the same dropout mask, in values and gradients."""

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.layers.cpu.dropout import attention_with_dropout, dropout

SCALING = 0.3


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Views of one (batch, length, 3, heads, head_dim) buffer, the output of a fused projection."""
    fused = torch.randn(2, 7, 3, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return fused, *(tensor.transpose(1, 2) for tensor in fused.unbind(2))


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    scores = (query * SCALING) @ key.transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    return dropout(torch.softmax(scores, -1), rate, training=True) @ value


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_equals_the_formula(rate: float, masked: bool) -> None:
    fused, query, key, value = inputs()
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., 4:] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if masked else None
    results = []
    for attend in (
        lambda: formula(query, key, value, added, rate),
        lambda: attention_with_dropout(query, key, value, added, scale=SCALING, dropout=rate),
    ):
        torch.manual_seed(3)
        context = attend()
        (gradient,) = torch.autograd.grad((context * torch.arange(6)).sum(), fused, retain_graph=True)
        results.append((context, gradient))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_bias_has_its_gradient() -> None:
    """One bias for the whole batch, or one for each example."""
    _, query, key, value = inputs()
    for batch in (1, 2):
        bias = torch.randn(batch, 4, 7, 7, generator=torch.Generator().manual_seed(batch)).requires_grad_()
        gradients = []
        for attend in (formula, lambda *args: attention_with_dropout(*args[:4], scale=SCALING, dropout=args[4])):
            torch.manual_seed(3)
            context = attend(query, key, value, bias, 0.3)
            gradients.append(torch.autograd.grad((context * torch.arange(6)).sum(), bias)[0])
        torch.testing.assert_close(gradients[1], gradients[0])


def test_bfloat16_is_close_to_float32() -> None:
    """Half-precision inputs, as under autocast, with the softmax in float32."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        fused, query, key, value = inputs(dtype)
        torch.manual_seed(3)
        context = attention_with_dropout(query, key, value, None, scale=SCALING, dropout=0.1)
        assert context.dtype is dtype
        (gradient,) = torch.autograd.grad(context.float().square().sum(), fused)
        results.append((context.float(), gradient.float()))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


def test_output_is_contiguous_for_the_output_projection() -> None:
    _, query, key, value = inputs()
    context = attention_with_dropout(query, key, value, None, scale=SCALING, dropout=0.1).transpose(1, 2)
    assert context.is_contiguous()
