"""The tagging network, compared with naive LSTMs and losses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.networks.tagging import TaggingNetwork, TaggingOptions
from hf_ctxmodels.layers.recurrent.highway import HighwayLSTM
from hf_ctxmodels.layers.recurrent.rnn import LSTM

LABELS = ["O", "B-X", "I-X"]
LENGTHS = (5, 2, 3)


def make_tagger(**options: object) -> TaggingNetwork:
    torch.manual_seed(0)
    defaults = {"hidden_size": 6, "num_layers": 2, "dropout": 0.0} | options
    tagger = TaggingNetwork(4, len(LABELS), TaggingOptions(**defaults), output_size=3, labels=LABELS)
    for parameter in tagger.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return tagger


def lstm_oracle(layer: LSTM, words: Tensor) -> Tensor:
    """(words, input) -> (words, 2 * hidden), word by word."""
    outputs = []
    for direction in range(2):
        sequence = words.flip(0) if direction else words
        hidden = cell = words.new_zeros(layer.cell_size)
        states = []
        for word in sequence:
            gates = (
                layer.input_weight[direction] @ word + layer.state_weight[direction] @ hidden + layer.bias[direction]
            )
            i, f, g, o = gates.chunk(4)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        outputs.append(torch.stack(states[::-1] if direction else states))
    return torch.cat(outputs, -1)


def highway_oracle(layer: HighwayLSTM, words: Tensor, backward: bool) -> Tensor:
    """(words, input) -> (words, hidden), equations 5 to 11 of He et al. 2017."""
    hidden = cell = words.new_zeros(layer.hidden_size)
    states = []
    weights, highway = layer.input_weight.split([5 * layer.hidden_size, layer.hidden_size])
    for word in words.flip(0) if backward else words:
        i, f, o, r, c = (weights @ word + layer.state_weight @ hidden + layer.bias).chunk(5)
        cell = i.sigmoid() * c.tanh() + f.sigmoid() * cell
        hidden = r.sigmoid() * (o.sigmoid() * cell.tanh()) + (1 - r.sigmoid()) * (highway @ word)
        states.append(hidden)
    return torch.stack(states[::-1] if backward else states)


def emissions_oracle(tagger: TaggingNetwork, words: Tensor, output: Tensor, predicate: Tensor) -> Tensor:
    states = words
    if tagger.predicate_embeddings is not None:
        states = torch.cat([states, tagger.predicate_embeddings.weight[predicate]], -1)
    for depth, layer in enumerate(tagger.layers):
        is_highway = isinstance(layer, HighwayLSTM)
        states = highway_oracle(layer, states, depth % 2 == 1) if is_highway else lstm_oracle(layer, states)
    return F.linear(torch.cat([states, output], -1), tagger.classifier.weight, tagger.classifier.bias)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("options", [{}, {"highway": True, "num_layers": 3, "predicate_size": 2}, {"crf": False}])
def test_loss_and_gradients_match_naive_network(options: dict[str, object], side: str) -> None:
    tagger = make_tagger(**options)
    sentences, outputs = [torch.randn(length, 4) for length in LENGTHS], [torch.randn(length, 3) for length in LENGTHS]
    tags = [torch.tensor([0, 1, 2, 2, 0]), torch.tensor([1, 2]), torch.tensor([IGNORE_INDEX, 1, 0])]
    predicates = [torch.arange(length) == 1 for length in LENGTHS]

    def pad(rows: list[Tensor], value: float = 0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, True, value, padding_side=side)

    is_word = pad([torch.ones(length, dtype=torch.bool) for length in LENGTHS])
    loss, logits = tagger(
        pad(sentences), is_word, pad(tags, IGNORE_INDEX), pad(outputs), is_predicate=pad(predicates).long()
    )
    emissions = [
        emissions_oracle(tagger, *row) for row in zip(sentences, outputs, [p.long() for p in predicates], strict=True)
    ]
    if tagger.crf is None:
        total = sum(F.cross_entropy(*row, reduction="sum") for row in zip(emissions, tags, strict=True))
    else:
        masks = [torch.ones(1, length, dtype=torch.bool) for length in LENGTHS]
        total = -sum(
            tagger.crf.log_likelihood(row[None], mask, tag[None])[0]
            for row, mask, tag in zip(emissions, masks, tags, strict=True)
        )
    torch.testing.assert_close(logits[is_word], torch.cat(emissions), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, total / 9)
    parameters = [*tagger.parameters()]
    for gradient, naive in zip(*(torch.autograd.grad(value, parameters) for value in (loss, total / 9)), strict=True):
        torch.testing.assert_close(gradient, naive, atol=1e-5, rtol=1e-4)
    losses = [tagger(words[None], torch.ones(1, len(words), dtype=torch.bool), tag[None], out[None], 9, mark[None])[0]
              for words, tag, out, mark in zip(sentences, tags, outputs, predicates, strict=True)]  # fmt: skip
    torch.testing.assert_close(sum(losses), loss)


@pytest.mark.parametrize("options", [{}, {"crf": False}], ids=["crf", "softmax"])
def test_predictions_are_valid_and_match_logits(options: dict[str, object]) -> None:
    tagger = make_tagger(**options).eval()
    tagger.classifier.bias.data[2] += 3  # many I-X
    vectors, is_word = torch.randn(40, 6, 4), torch.arange(6) < torch.randint(1, 7, (40, 1))
    with torch.no_grad():
        _, logits = tagger(vectors, is_word, output_vectors=torch.zeros(40, 6, 3))
        emissions = tagger.emissions(vectors, is_word, torch.zeros(40, 6, 3))
    tags = tagger.decode(emissions, is_word)
    assert (logits.argmax(-1)[is_word] == tags[is_word]).all()
    assert (emissions.argmax(-1)[:, 0] == 2).any(), "emissions alone already give valid tags"
    for row in tags.tolist():
        assert all(tag != 2 or previous in (1, 2) for previous, tag in zip([0, *row], row, strict=False))
    unconstrained = make_tagger(crf=False, constrained=False).eval()
    _, logits = unconstrained(vectors, is_word, output_vectors=torch.zeros(40, 6, 3))
    assert torch.equal(logits, unconstrained.emissions(vectors, is_word, torch.zeros(40, 6, 3)))
    assert torch.equal(unconstrained.decode(logits, is_word)[is_word], logits.argmax(-1)[is_word])


@pytest.mark.parametrize("options", [{"highway": True}, {"variational_dropout": True}])
def test_dropout_masks_are_equal_for_all_words(options: dict[str, object]) -> None:
    tagger = make_tagger(dropout=0.5, **options).train()
    zeros: list[Tensor] = []
    module = tagger.layers[0] if tagger.layers[0].__class__ is HighwayLSTM else tagger.dropout
    module.register_forward_hook(lambda _, inputs, output: zeros.append(output == 0))
    tagger(torch.randn(1, 5, 4), torch.ones(1, 5, dtype=torch.bool), output_vectors=torch.ones(1, 5, 3))
    for mask in zeros:
        assert (mask.flatten(0, -2) == mask.flatten(0, -2)[:1]).all()
    assert any(mask.any() for mask in zeros)


def test_missing_predicate_raises() -> None:
    with pytest.raises(CtxError, match="predicate"):
        make_tagger(predicate_size=2)(torch.randn(1, 2, 4), torch.ones(1, 2, dtype=torch.bool))
