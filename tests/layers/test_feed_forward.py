"""Feed-forward networks: finite in float16, and chunked on a CPU; RMSNorm equals T5's."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5LayerNorm
from zoo import assert_close

from hf_ctxmodels.layers.common import RMSNorm
from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.transformer import FeedForward, GatedFeedForward

both_networks = pytest.mark.parametrize("network", [FeedForward, GatedFeedForward])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_equals_t5(dtype: torch.dtype) -> None:
    """Outputs and gradients, also if squares overflow float16."""
    torch.manual_seed(0)
    norms = [norm_class(16, eps=1e-6).to(dtype) for norm_class in (RMSNorm, T5LayerNorm)]
    states, results = (1000 * torch.randn(3, 5, 16)).to(dtype).requires_grad_(), []
    assert torch.equal(*(norm(states) for norm in norms))
    for norm in norms:
        norm.weight.data = torch.linspace(0.5, 1.5, 16, dtype=dtype)
        outputs = norm(states)
        loss = (outputs.float() * torch.arange(16)).sum()
        results.append((outputs, *torch.autograd.grad(loss, [states, norm.weight])))
    assert_close(*results, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


@both_networks
def test_clamped_network_is_finite_in_float16(network: type[FeedForward]) -> None:
    torch.manual_seed(0)
    unclamped, clamped = (network(8, 16, "relu", bias=False, clamp=clamp) for clamp in (False, True))
    clamped.load_state_dict(unclamped.state_dict())
    states = torch.randn(4, 8)
    assert_close(clamped(states), unclamped(states))
    for parameter in (*unclamped.parameters(), *clamped.parameters()):
        parameter.data.copy_(100 * parameter.data.sign())
    assert torch.equal(clamped(1e3 * states), unclamped(1e3 * states)), "other types are not clamped"
    large = (3e3 * states).half()
    assert not unclamped.half()(large).isfinite().all()
    assert clamped.half()(large).isfinite().all()
    assert clamped(large).abs().max().item() == torch.finfo(torch.float16).max


class RecordingReLU(nn.Module):
    """ReLU that records the number of rows of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.rows.append(len(states))
        return states.relu()


@both_networks
def test_chunked_pass_equals_single_pass(network: type[FeedForward], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are used only without dropout, gradients and hooks."""
    monkeypatch.setattr(cpu_linear, "CHUNK_ROWS", 8)
    torch.manual_seed(0)
    layer = network(16, 32, "relu", dropout=0.5).eval()
    layer.activation = RecordingReLU()
    states = torch.randn(3, 7, 16)
    expected = layer(states)
    layer.activation.rows.clear()
    with torch.no_grad():
        assert_close(layer(states), expected)
        assert layer.activation.rows == [8, 8, 5]
        layer.train()(states)
        assert layer.activation.rows[3:] == [3]
        layer.eval()
        for module in (layer.activation, layer.up_proj):
            handle = module.register_forward_hook(lambda *_: None)
            layer.activation.rows.clear()
            assert_close(layer(states), expected)
            assert layer.activation.rows == [3]
            handle.remove()
