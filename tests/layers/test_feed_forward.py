"""Feed-forward networks and RMSNorm: equal to T5's, finite in float16, and computed in chunks on a CPU."""

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm
from zoo import assert_close

from hf_ctxmodels.layers.common import RMSNorm
from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.transformer import FeedForward, GatedFeedForward

both_networks = pytest.mark.parametrize("network", [FeedForward, GatedFeedForward])


def assert_same(module: nn.Module, reference: nn.Module, states: Tensor, names: dict[str, str]) -> None:
    """Compare outputs and gradients; `names` maps the parameters of the module to the reference's."""
    with torch.no_grad():
        for name, reference_name in names.items():
            module.get_parameter(name).copy_(reference.get_parameter(reference_name))
    results = []
    for layer, parameters in ((module, names.keys()), (reference, names.values())):
        outputs = layer(states)
        leaves = [states, *map(layer.get_parameter, parameters)]
        loss = (outputs.float() * torch.arange(outputs.shape[-1])).sum()
        results.append((outputs, *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert_close(actual.float(), expected.float(), tolerance=1e-5 if actual.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_equals_t5(dtype: torch.dtype) -> None:
    """Also if squares overflow float16."""
    torch.manual_seed(0)
    reference = T5LayerNorm(16, eps=1e-6).to(dtype)
    states = (1000 * torch.randn(3, 5, 16)).to(dtype).requires_grad_()
    assert torch.equal(RMSNorm(16, eps=1e-6).to(dtype)(states), reference(states))
    nn.init.uniform_(reference.weight, 0.5, 1.5)
    assert_same(RMSNorm(16, eps=1e-6).to(dtype), reference, states, {"weight": "weight"})


def test_feed_forward_equals_t5() -> None:
    torch.manual_seed(0)
    states = torch.randn(3, 5, 16, requires_grad=True)
    sizes = {"d_model": 16, "d_ff": 40, "dropout_rate": 0.0}
    reference: nn.Module = T5DenseActDense(T5Config(**sizes))
    names = {"up_proj.weight": "wi.weight", "down_proj.weight": "wo.weight"}
    assert_same(FeedForward(16, 40, "relu", bias=False), reference, states, names)
    reference = T5DenseGatedActDense(T5Config(**sizes, feed_forward_proj="gated-gelu"))
    names = {"up_proj.weight": "wi_1.weight", "gate_proj.weight": "wi_0.weight", "down_proj.weight": "wo.weight"}
    assert_same(GatedFeedForward(16, 40, "gelu_new", bias=False), reference, states, names)


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
def test_chunks_equal_one_pass(network: type[FeedForward], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are used only without dropout, gradients and hooks."""
    monkeypatch.setattr(cpu_linear, "_CHUNK_ROWS", 8)
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
