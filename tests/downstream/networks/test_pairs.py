"""Networks for texts and text pairs, compared with the formulas of their papers for one example without padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from network_oracles import assert_same_with_gradients, randomize, run_recurrent
from torch import Tensor, nn

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.networks import pairs
from hf_ctxmodels.downstream.networks.pairs import (
    BiattentiveNetwork,
    BiattentiveOptions,
    DecomposableAttention,
    DecomposableAttentionOptions,
    Esim,
    EsimOptions,
    SentenceNetwork,
    SentenceOptions,
)

INPUT, OUTPUT, LABELS = 6, 3, 3
PAIRS = ((5, 4), (1, 13), (3, 0), (2, 2))  # words of both texts; the third is a single text


def make_batch(layout: str) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """(vectors, is_word, is_second), and the columns of both texts of each row; vectors at padding are not 0."""
    is_word, is_second, columns = torch.zeros(4, 16, dtype=torch.bool), torch.zeros(4, 16, dtype=torch.bool), []
    for row, (first, second) in enumerate(PAIRS):
        begin = {"right": 0, "left": 16 - first - second, "between": 1}[layout]
        gap = 1 if layout == "between" else 0
        first_columns = torch.arange(begin, begin + first)
        second_columns = torch.arange(begin + first + gap, begin + first + gap + second)
        is_word[row, first_columns] = True
        is_word[row, second_columns] = is_second[row, second_columns] = True
        columns.append((first_columns, second_columns if second else first_columns))
    return torch.randn(4, 16, INPUT, requires_grad=True), is_word, is_second, columns


def naive_esim(network: Esim, first: Tensor, second: Tensor, *outputs: Tensor) -> Tensor:
    texts = [run_recurrent(network.encoder, text) for text in (first, second)]
    texts = [torch.cat([text, output], -1) for text, output in zip(texts, outputs, strict=True)]
    pooled = []
    for text, other in (texts, texts[::-1]):
        composed = []
        for word in text:
            weights = torch.stack([(word * other_word).sum() for other_word in other]).softmax(0)
            aligned = sum(weight * other_word for weight, other_word in zip(weights, other, strict=True))
            composed.append(network.projection(torch.cat([word, aligned, word - aligned, word * aligned])).relu())
        states = run_recurrent(network.composition, torch.stack(composed))
        pooled += [states.mean(0), states.max(0).values]
    hidden, _, _, output = network.classifier
    return output(hidden(torch.cat(pooled)).tanh())


def feed_forward(layers: nn.Sequential, state: Tensor) -> Tensor:
    return layers[4](layers[1](state).relu()).relu()


def naive_attention(network: DecomposableAttention, first: Tensor, second: Tensor) -> Tensor:
    texts = [text @ network.projection.weight.T for text in (first, second)]
    if network.intra is not None:
        extended = []
        for text in texts:
            hidden = [feed_forward(network.intra, word) for word in text]
            rows = []
            for i, word in enumerate(text):
                bias = [network.distance_bias[0 if abs(i - j) > 10 else i - j + 11] for j in range(len(text))]
                scores = torch.stack([hidden[i] @ hidden[j] + bias[j] for j in range(len(text))])
                rows.append(torch.cat([word, scores.softmax(0) @ text]))
            extended.append(torch.stack(rows))
        texts = extended
    summed = []
    for text, other in (texts, texts[::-1]):
        compared = []
        for word in text:
            scores = [feed_forward(network.attend, word) @ feed_forward(network.attend, partner) for partner in other]
            compared.append(feed_forward(network.compare, torch.cat([word, torch.stack(scores).softmax(0) @ other])))
        summed.append(sum(compared))
    return network.output(feed_forward(network.aggregate, torch.cat(summed)))


def naive_biattention(network: BiattentiveNetwork, first: Tensor, second: Tensor) -> Tensor:
    layers, pooled = network.biattention, []
    texts = [run_recurrent(layers.encoder, layers.project(text).relu()) for text in (first, second)]
    affinities = texts[0] @ texts[1].T
    for number, scores in enumerate((affinities, affinities.T)):
        text = texts[number]
        summary = scores.softmax(1) @ texts[1 - number]
        states = run_recurrent(layers.integrators[number], torch.cat([text, text - summary, text * summary], 1))
        self_attentive = (states @ layers.selectors[number].weight[0]).softmax(0) @ states
        pooled += [states.amax(0), states.mean(0), states.amin(0), self_attentive]
    state = torch.cat(pooled)
    for norm, _, maxout in zip(*[iter(network.classifier)] * 3, strict=True):
        state = (state - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
        state = torch.stack([piece.amax() for piece in maxout.maps(state).split(maxout.pieces)])
    return state


def naive_sentence(network: SentenceNetwork, text: Tensor, _: Tensor, *outputs: Tensor) -> Tensor:
    for layer in network.layers:
        text = run_recurrent(layer, text)
    text = torch.cat([text, *outputs[:1]], -1)
    if network.attention is None:
        return network.classifier(text.amax(0))
    first, _, last = network.attention
    weights = (last.weight @ (first.weight @ text.T).tanh()).softmax(1)
    return network.classifier((weights @ text).flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "esim": (lambda: Esim(INPUT, LABELS, EsimOptions(hidden_size=4), OUTPUT), naive_esim),
    "decomposable": (
        lambda: DecomposableAttention(INPUT, LABELS, DecomposableAttentionOptions(hidden_size=4)),
        naive_attention,
    ),
    "intra": (
        lambda: DecomposableAttention(INPUT, LABELS, DecomposableAttentionOptions(hidden_size=4, intra_attention=True)),
        naive_attention,
    ),
    "biattentive": (lambda: BiattentiveNetwork(INPUT, LABELS, BiattentiveOptions(hidden_size=3)), naive_biattention),
    "max": (lambda: SentenceNetwork(INPUT, LABELS, SentenceOptions(4, num_layers=2), OUTPUT), naive_sentence),
    "attention": (lambda: SentenceNetwork(INPUT, LABELS, SentenceOptions(4, 1, 2, 5)), naive_sentence),
}


@pytest.mark.parametrize("layout", ["right", "left", "between"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_match_formulas(name: str, layout: str) -> None:
    """Logits and gradients, with padding on either side and between the texts."""
    torch.manual_seed(0)
    build, naive = NETWORKS[name]
    network = randomize(build())
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    vectors, is_word, is_second, columns = make_batch(layout)
    inputs: dict[str, Any] = {"vectors": vectors}
    if name in ("esim", "max"):
        inputs["output_vectors"] = torch.randn(4, 16, OUTPUT, requires_grad=True)
    if name in ("max", "attention"):
        is_second = torch.zeros_like(is_second)
        columns = [
            (torch.cat([first, second]) if row != 2 else first, first) for row, (first, second) in enumerate(columns)
        ]
    logits = network(**inputs, is_word=is_word, is_second=is_second)
    expected = torch.stack(
        [
            naive(network, *(tensor[row, text] for tensor in inputs.values() for text in texts))
            for row, texts in enumerate(columns)
        ]
    )
    assert_same_with_gradients(network, logits, expected, *inputs.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_packed_equals_padded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced network also computes padding, with equal logits."""
    torch.manual_seed(0)
    vectors, is_word, is_second, _ = make_batch("left")
    inputs = {"vectors": vectors, "is_word": is_word}
    if name not in ("max", "attention"):
        inputs["is_second"] = is_second
    if name in ("esim", "max"):
        inputs["output_vectors"] = torch.randn(4, 16, OUTPUT)
    network = randomize(NETWORKS[name][0]())
    expected = network(**inputs)
    monkeypatch.setattr(pairs, "is_traced", lambda tensor: True)
    torch.testing.assert_close(network(**inputs), expected, atol=1e-5, rtol=1e-4)


def test_invalid_input_raises() -> None:
    vectors, is_word, is_second, _ = make_batch("right")
    with pytest.raises(CtxError, match="reads one text"):
        SentenceNetwork(INPUT, LABELS, SentenceOptions(4))(vectors, is_word, is_second)
    is_word[1] = False
    with pytest.raises(CtxError, match="Row 1"):
        Esim(INPUT, LABELS, EsimOptions(4))(vectors, is_word, is_second)
