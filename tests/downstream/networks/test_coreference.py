"""The coreference network, compared span by span with the equations of Lee et al. 2017."""

import math

import pytest
import torch
from torch import Tensor

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.networks.coreference import CoreferenceNetwork, CoreferenceOptions, select_spans

SENTENCES = [[4, 3], [6]]  # number of words per sentence, for two texts
CLUSTERS = [{(0, 1): 5, (1, 3): 5, (4, 7): 7, (2, 4): 7, (5, 6): 5}, {(0, 2): 0, (3, 4): 0, (4, 5): 0, (1, 4): 9}]
SIZES = {"hidden_size": 3, "scorer_size": 4, "feature_size": 2, "dropout": 0.0, "max_span_width": 3}


def make_network(**options: float) -> CoreferenceNetwork:
    torch.manual_seed(0)
    network = CoreferenceNetwork(5, CoreferenceOptions(**SIZES | options)).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return network


def make_batch(side: str) -> dict[str, Tensor]:
    """Both texts, padded on one side."""
    lengths = [sum(lengths) for lengths in SENTENCES]
    size = max(lengths) + 1
    generator = torch.Generator().manual_seed(1)
    batch = {
        "vectors": torch.randn(2, size, 5, dtype=torch.float64, generator=generator),
        "is_word": torch.zeros(2, size, dtype=torch.bool),
        "sentence_ids": torch.full((2, size), 3),
        "labels": torch.full((2, size, 3), -100),
    }
    words = torch.randn(2, size, 5, dtype=torch.float64, generator=generator)
    for row, length in enumerate(lengths):
        start = size - length if side == "left" else 0
        positions = slice(start, start + length)
        batch["vectors"][row, positions] = words[row, :length]
        batch["is_word"][row, positions] = True
        ids = [number for number, count in enumerate(SENTENCES[row]) for _ in range(count)]
        batch["sentence_ids"][row, positions] = torch.tensor(ids)
        for (first, end), cluster in CLUSTERS[row].items():
            batch["labels"][row, start + first, end - first - 1] = cluster
    return batch


def crosses(first: tuple[int, int], second: tuple[int, int]) -> bool:
    (a, b), (c, d) = sorted((first, second))
    return a < c < b < d


def distance_class(distance: int) -> int:
    return distance - 1 if distance < 5 else int(math.log2(distance)) + 2


def score_text(network: CoreferenceNetwork, vectors: Tensor, sentences: list[int]) -> dict[str, dict]:
    """Mention scores and antecedent scores of the selected spans of one text."""
    options = network.options
    states = vectors
    if options.num_layers:
        [layer] = network.lstm
        lstm = torch.nn.LSTM(5, options.hidden_size, bidirectional=True, batch_first=True).double()
        weights = {}
        for direction, suffix in enumerate(("", "_reverse")):
            weights[f"weight_ih_l0{suffix}"] = layer.input_weight[direction]
            weights[f"weight_hh_l0{suffix}"] = layer.state_weight[direction]
            weights[f"bias_ih_l0{suffix}"] = layer.bias[direction]
            weights[f"bias_hh_l0{suffix}"] = torch.zeros_like(layer.bias[direction])
        outputs = [torch.func.functional_call(lstm, weights, sentence)[0] for sentence in vectors.split(sentences)]
        states = torch.cat(outputs)
    spans, first = {}, 0
    for length in sentences:
        for start in range(first, first + length):
            for end in range(start + 1, min(first + length, start + options.max_span_width) + 1):
                attention = torch.cat([network.head_scorer(states[word]) for word in range(start, end)]).softmax(0)
                head = sum(prob * vectors[word] for prob, word in zip(attention, range(start, end), strict=True))
                width = network.width_embeddings.weight[end - start - 1]
                spans[start, end] = torch.cat([states[start], states[end - 1], head, width])
        first += length
    layers = (network.start_layer, network.end_layer, network.head_layer, network.width_layer)
    weight = torch.cat([layer.weight for layer in layers], 1)
    mention_scores = {
        span: network.mention_scorer(weight @ vector + network.start_layer.bias)[0] for span, vector in spans.items()
    }
    selected: list[tuple[int, int]] = []
    limit = math.ceil(options.spans_per_word * len(vectors))
    for span in sorted(spans, key=lambda span: -mention_scores[span].item()):
        if len(selected) < limit and not any(crosses(span, other) for other in selected):
            selected.append(span)
    selected.sort()
    antecedent_scores: dict[tuple, dict[tuple, Tensor]] = {}
    for i, span in enumerate(selected):
        anaphor = spans[span]
        coarse = {
            selected[j]: mention_scores[span] + mention_scores[selected[j]]
            + spans[selected[j]] @ network.coarse_weight(anaphor)
            for j in range(i)
        }  # fmt: skip
        best = sorted(coarse, key=lambda antecedent: -coarse[antecedent].item())[: options.max_antecedents]
        antecedent_scores[span] = {}
        for antecedent in best:
            vector = spans[antecedent]
            distance = network.distance_embeddings.weight[distance_class(i - selected.index(antecedent))]
            layers = (network.anaphor_layer, network.antecedent_layer, network.product_layer, network.distance_layer)
            inputs = torch.cat([anaphor, vector, anaphor * vector, distance])
            hidden = torch.cat([layer.weight for layer in layers], 1) @ inputs + network.anaphor_layer.bias
            score = coarse[antecedent] + network.antecedent_scorer(hidden)[0]
            antecedent_scores[span][antecedent] = score
    return {"mentions": {span: mention_scores[span] for span in selected}, "antecedents": antecedent_scores}


def text_loss(antecedent_scores: dict, clusters: dict) -> Tensor:
    loss = torch.zeros(())
    for span, scores in antecedent_scores.items():
        probabilities = torch.stack([torch.zeros(()).double(), *scores.values()]).softmax(0)
        correct = [i for i, other in enumerate(scores, 1) if clusters.get(other, -1) == clusters.get(span, -2)]
        loss = loss - probabilities[correct or [0]].sum().log()
    return loss


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "options",
    [
        {"spans_per_word": 5},  # all spans that do not cross
        {"spans_per_word": 0.6, "num_layers": 0, "scorer_layers": 1},
        {"spans_per_word": 1.3, "max_antecedents": 2},
    ],
)
def test_network_matches_equations(side: str, options: dict[str, float]) -> None:
    """Selected spans, scores, best antecedents, loss, and all gradients."""
    network, batch = make_network(**options), make_batch(side)
    output = network(**batch)
    losses, has_antecedent = [], set()
    for row, lengths in enumerate(SENTENCES):
        expected = score_text(network, batch["vectors"][row][batch["is_word"][row]], lengths)
        spans = [tuple(span) for span in output.spans[row].tolist() if span[0] >= 0]
        assert spans == list(expected["mentions"])
        for index, span in enumerate(spans):
            torch.testing.assert_close(output.mention_scores[row, index], expected["mentions"][span])
            scores = expected["antecedents"][span]
            pairs = zip(output.candidates[row, index].tolist(), output.antecedent_scores[row, index], strict=True)
            actual = {spans[candidate]: score for candidate, score in pairs if score > -math.inf}
            assert actual.keys() == scores.keys()
            for antecedent in scores:
                torch.testing.assert_close(actual[antecedent], scores[antecedent])
            best = max(scores, key=lambda antecedent: scores[antecedent].item(), default=None)
            best = None if best is None or scores[best] < 0 else best
            index_of_best = output.antecedents[row, index].item()
            assert (spans[index_of_best] if index_of_best >= 0 else None) == best
            has_antecedent.add(best is not None)
        losses.append(text_loss(expected["antecedents"], CLUSTERS[row]))
    assert has_antecedent == {True, False}
    num_labels = (batch["labels"] >= 0).sum()
    expected_loss = sum(losses) / num_labels
    torch.testing.assert_close(output.loss, expected_loss, check_dtype=False, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network(**batch, num_items=4).loss * 4 / num_labels, output.loss)
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(output.loss, [*parameters.values()], allow_unused=True)
    expected_gradients = torch.autograd.grad(expected_loss, [*parameters.values()], allow_unused=True)
    for name, gradient, expected_gradient in zip(parameters, gradients, expected_gradients, strict=True):
        zeros = torch.zeros_like(parameters[name])
        sides = [zeros if value is None else value for value in (gradient, expected_gradient)]
        torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-6, msg=name)


def test_selected_spans_do_not_cross() -> None:
    generator = torch.Generator().manual_seed(0)
    for limit in (1, 4, 12, 100):
        scores = torch.randn(12, 4, generator=generator)
        scores[torch.arange(12)[:, None] + torch.arange(4) >= 12] = -math.inf
        spans = [divmod(index, 4) for index in select_spans(scores, limit)]
        expected: list[tuple[int, int]] = []
        for index in scores.flatten().argsort(descending=True).tolist():
            first, extra = divmod(index, 4)
            span = (first, first + extra + 1)
            is_span = scores.flatten()[index] > -math.inf and len(expected) < limit
            if is_span and not any(crosses(span, other) for other in expected):
                expected.append(span)
        assert [(first, first + extra + 1) for first, extra in spans] == sorted(expected)


def test_invalid_input_raises() -> None:
    network, batch = make_network(), make_batch("right")
    with pytest.raises(CtxError, match="expected"):
        network(**batch | {"labels": batch["labels"][..., :2]})
    with pytest.raises(CtxError, match="sentence_ids"):
        network(**batch | {"sentence_ids": batch["sentence_ids"] + 6})
    batch["is_word"][1] = False
    with pytest.raises(CtxError, match="no words"):
        network(**batch)
    with pytest.raises(CtxError, match="out of range"):
        CoreferenceOptions(max_span_width=0)
