"""FLOP counts of this package's fast paths against the counts of torch operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hf_ctxmodels.comparison.flops import flop_counter
from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM


def test_linear_layers():
    layer, states = nn.Linear(256, 384), torch.randn(64, 256, requires_grad=True)
    with flop_counter() as counter:
        cpu_linear.linear(layer, states).sum().backward()
    with FlopCounterMode(display=False) as reference_counter:
        layer(states).sum().backward()
    assert counter.get_total_flops() == reference_counter.get_total_flops() == 3 * 2 * 64 * 256 * 384


def test_attention():
    query, key, value = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    with flop_counter() as counter:
        F.scaled_dot_product_attention(query, key, value).sum().backward()
    # forward: scores and their product with the values; backward: the scores again, and both gradients of each product
    assert counter.get_total_flops() == (2 + 5) * 2 * 2 * 4 * 32 * 32 * 16


@pytest.mark.parametrize(("layer_class", "gates"), [(LSTM, 4), (GRU, 3)])
def test_recurrent_layers(layer_class, gates):
    """One product with the input and one with the state per token, and twice as many for the gradients."""
    layer, mask = layer_class(32, 64), torch.ones(8, 5, dtype=torch.bool)
    packing = PackedSequences.build(mask)
    states = torch.randn(2, 8 * 5, 32, requires_grad=True)
    with flop_counter() as counter:
        layer(states, packing)[0].sum().backward()
    expected = 3 * 2 * 2 * 40 * (32 + 64) * gates * 64
    # the initial state has no gradient
    assert 0.8 * expected < counter.get_total_flops() <= expected
