"""The feed-forward network by parts of its rows, as a CPU computes it without gradients."""

import pytest
import torch
from torch import Tensor, nn
from zoo import assert_close

from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.transformer import FeedForward, GatedFeedForward


class Recording(nn.Module):
    """An activation that keeps the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.rows.append(len(states))
        return states.relu()


@pytest.mark.parametrize("network", [FeedForward, GatedFeedForward])
def test_parts_equal_the_whole(network: type[FeedForward], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal states, with no more rows at once than a part has; whole where dropout, gradients or a hook need them."""
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
        for each in (layer.activation, layer.up_proj):
            handle = each.register_forward_hook(lambda *_: None)
            layer.activation.rows.clear()
            assert_close(layer(states), expected)
            assert layer.activation.rows == [3]
            handle.remove()
