"""The feed-forward network in chunks of rows, as computed on a CPU without gradients."""

import pytest
import torch
from torch import Tensor, nn
from zoo import assert_close

from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.transformer import FeedForward, GatedFeedForward


class Recording(nn.Module):
    """ReLU that records the number of rows of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.rows.append(len(states))
        return states.relu()


@pytest.mark.parametrize("network", [FeedForward, GatedFeedForward])
def test_chunks_equal_one_pass(network: type[FeedForward], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are used only without dropout, gradients and hooks."""
    monkeypatch.setattr(cpu_linear, "_CHUNK_ROWS", 8)
    torch.manual_seed(0)
    layer = network(16, 32, "relu", dropout=0.5).eval()
    layer.activation = Recording()
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
