"""Norm and feed-forward layers of T5: those of transformers, and in fp16 finite where these overflow."""

import pytest
import torch
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm
from zoo import assert_close

from hf_ctxmodels.layers.common import RMSNorm
from hf_ctxmodels.layers.transformer import FeedForward, GatedFeedForward


def assert_alike(ours: nn.Module, theirs: nn.Module, states: torch.Tensor, pairs: dict[str, str]) -> None:
    """One output and one gradient, of the input and of the parameters by their names here and there."""
    own, other = (dict(module.named_parameters()) for module in (ours, theirs))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(other[pairs[name]])
    results = []
    for module, names in ((ours, pairs.keys()), (theirs, pairs.values())):
        outputs = module(states)
        parameters = [module.get_parameter(name) for name in names]
        gradients = torch.autograd.grad(
            (outputs.float() * torch.arange(outputs.shape[-1])).sum(), [states, *parameters]
        )
        results.append((outputs, *gradients))
    for one, two in zip(*results, strict=True):
        assert one.dtype == two.dtype
        assert_close(one.float(), two.float(), tolerance=1e-5 if one.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_is_that_of_t5(dtype: torch.dtype) -> None:
    """Also where squares overflow fp16."""
    torch.manual_seed(0)
    theirs = T5LayerNorm(16, eps=1e-6).to(dtype)
    nn.init.uniform_(theirs.weight, 0.5, 1.5)
    states = (1000 * torch.randn(3, 5, 16)).to(dtype).requires_grad_()
    assert torch.equal(RMSNorm(16, eps=1e-6).to(dtype)(states), T5LayerNorm(16, eps=1e-6).to(dtype)(states))
    assert_alike(RMSNorm(16, eps=1e-6).to(dtype), theirs, states, {"weight": "weight"})


def test_feed_forward_layers_are_those_of_t5() -> None:
    torch.manual_seed(0)
    states = torch.randn(3, 5, 16, requires_grad=True)
    plain = T5Config(d_model=16, d_ff=40, dropout_rate=0.0)
    gated = T5Config(d_model=16, d_ff=40, dropout_rate=0.0, feed_forward_proj="gated-gelu")
    names = {"up_proj.weight": "wi.weight", "down_proj.weight": "wo.weight"}
    assert_alike(FeedForward(16, 40, "relu", bias=False), T5DenseActDense(plain), states, names)
    names = {"up_proj.weight": "wi_1.weight", "gate_proj.weight": "wi_0.weight", "down_proj.weight": "wo.weight"}
    assert_alike(GatedFeedForward(16, 40, "gelu_new", bias=False), T5DenseGatedActDense(gated), states, names)


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_a_clamped_feed_forward_is_finite_in_half_precision(kind: type[FeedForward]) -> None:
    torch.manual_seed(0)
    free, clamped = (kind(8, 16, "relu", bias=False, clamp=clamp) for clamp in (False, True))
    clamped.load_state_dict(free.state_dict())
    states = torch.randn(4, 8)
    assert_close(clamped(states), free(states))
    large = (3e3 * states).half()
    for module in (free, clamped):
        for parameter in module.parameters():
            parameter.data.copy_(100 * parameter.data.sign())
    assert torch.equal(clamped(1e3 * states), free(1e3 * states)), "other types are not clamped"
    assert not free.half()(large).isfinite().all()
    assert clamped.half()(large).isfinite().all()
    assert clamped(large).abs().max().item() == torch.finfo(torch.float16).max
