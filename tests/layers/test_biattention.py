"""The biattentive network, against the paper's formulas for one pair of texts at a time."""

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.layers.common import SafeBatchNorm1d
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.models.cove.modeling_cove import Biattention, Maxout

WIDTH = 5


def read(layer: LSTM, states: Tensor) -> Tensor:
    """(length, width) -> (length, 2 * output) by torch's own LSTM."""
    own = torch.nn.LSTM(states.shape[1], WIDTH, bidirectional=True)
    for number, suffix in enumerate(("", "_reverse")):
        parts = {"weight_ih": layer.input_weight, "weight_hh": layer.state_weight, "bias_ih": layer.bias}
        for name, value in parts.items():
            getattr(own, f"{name}_l0{suffix}").data = value[number]
        getattr(own, f"bias_hh_l0{suffix}").data.zero_()
    return own(states)[0]


def plain(network: Biattention, first: Tensor, second: Tensor) -> Tensor:
    """(16 * width,) of two texts (words, input)."""
    texts = [read(network.encoder, network.project(text).relu()) for text in (first, second)]
    affinities = texts[0] @ texts[1].T
    pooled = []
    for number, scores in enumerate((affinities, affinities.T)):
        own, other = texts[number], texts[1 - number]
        summary = scores.softmax(1) @ other
        states = read(network.integrators[number], torch.cat([own, own - summary, own * summary], 1))
        chosen = (states @ network.selectors[number].weight[0]).softmax(0) @ states
        pooled += [states.amax(0), states.mean(0), states.amin(0), chosen]
    return torch.cat(pooled)


@pytest.mark.parametrize("unpad", [True, False])
def test_pairs_and_texts_alone(unpad: bool) -> None:
    torch.manual_seed(0)
    network = Biattention(7, WIDTH, 0.0)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    states, tokens = torch.randn(3, 9, 7), torch.zeros(3, 9, dtype=torch.bool)
    second = torch.zeros_like(tokens)
    tokens[0], second[0, 5:] = True, True
    tokens[1, 2:8], second[1, 3:8] = True, True  # padding on both sides
    tokens[2, :4] = True  # a text alone
    got = network(states, tokens, second, unpad)
    assert got.shape == (3, 16 * WIDTH)
    pairs = [(states[0, :5], states[0, 5:]), (states[1, 2:3], states[1, 3:8]), (states[2, :4], states[2, :4])]
    for row, pair in enumerate(pairs):
        torch.testing.assert_close(got[row], plain(network, *pair), atol=1e-5, rtol=1e-5)


def test_maxout_is_the_largest_of_its_maps() -> None:
    layer, states = Maxout(6, 4, 3), torch.randn(5, 6)
    weights, biases = layer.maps.weight.unflatten(0, (4, 3)), layer.maps.bias.unflatten(0, (4, 3))
    expected = torch.stack([states @ weights[:, piece].T + biases[:, piece] for piece in range(3)]).amax(0)
    torch.testing.assert_close(layer(states), expected)


def test_batch_normalisation_of_a_single_row() -> None:
    norm, states = SafeBatchNorm1d(6).train(), 5 + torch.randn(8, 6)
    assert norm(states).mean(0).abs().max() < 1e-5
    mean = norm.running_mean.clone()
    assert norm(states[:1]).shape == (1, 6)
    assert torch.equal(norm.running_mean, mean), "one row has no variance"
