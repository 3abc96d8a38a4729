"""Stochastic answer network: predictions, prediction dropout, saving and errors."""

import pytest
import torch
from torch import Tensor, nn
from zoo import FIRST_WORD, assert_close, tiny_config

from hf_ctxmodels import FAMILIES, CtxBertForSequenceClassification, CtxError
from hf_ctxmodels.heads.answer_network import AnswerNetwork

SIZE, LABELS, STEPS = 6, 3, 4


def make_network(steps: int = STEPS) -> AnswerNetwork:
    torch.manual_seed(0)
    network = AnswerNetwork(SIZE, LABELS, steps, dropout=0.0, prediction_dropout=0.0)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network.eval()


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """States, mask and segments of three pairs, padded on both sides."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    return torch.randn(3, 6, SIZE, generator=torch.Generator().manual_seed(1)), mask, types


def naive_probabilities(network: AnswerNetwork, states: Tensor, mask: Tensor, types: Tensor) -> Tensor:
    """(rows, steps, labels) probabilities, computed for each row with torch's GRU cell."""
    cell, probabilities = nn.GRUCell(SIZE, SIZE), []
    for name, layer in (("ih", network.input_gates), ("hh", network.state_gates)):
        getattr(cell, f"weight_{name}").data, getattr(cell, f"bias_{name}").data = layer.weight, layer.bias
    for row in range(len(states)):
        first, second = (states[row][(mask[row] == 1) & (types[row] == text)] for text in (0, 1))
        state = network.start(second)[:, 0].softmax(0) @ second
        for _ in range(network.steps):
            attended = (first @ network.attention.weight @ state).softmax(0) @ first
            features = torch.cat([state, attended, (state - attended).abs(), state * attended])
            probabilities.append(network.classifier(features).softmax(0))
            state = cell(attended[None], state[None])[0]
    return torch.stack(probabilities).view(len(states), network.steps, LABELS).detach()


def test_probabilities_equal_naive_reference() -> None:
    network, inputs = make_network(), make_inputs()
    expected = naive_probabilities(network, *inputs)
    assert_close(network(*inputs).exp(), expected.mean(1))
    one_step = make_network(1)
    one_step.load_state_dict({name: value for name, value in network.state_dict().items() if "gates" not in name})
    assert_close(one_step(*inputs).exp(), expected[:, 0])
    network.train()(*inputs).sum().backward()
    assert all(parameter.grad.any() for parameter in network.parameters())


@torch.no_grad()
def test_prediction_dropout() -> None:
    """The mean over a random, never empty subset of the steps: all steps but one have probability 1/2."""
    network, inputs = make_network().train(), make_inputs()
    network.prediction_dropout = 0.5
    samples = torch.stack([network(*inputs).exp()[:2] for _ in range(400)])
    probabilities = naive_probabilities(network, *inputs)[:2]
    subsets = [[step for step in range(STEPS) if bits >> step & 1] for bits in range(1, 2**STEPS)]
    means = torch.stack([probabilities[:, subset].mean(1) for subset in subsets])
    errors, indices = (samples[:, None] - means).abs().amax(-1).min(1)  # (samples, rows)
    assert errors.max() < 1e-5
    assert abs(sum(len(subsets[index]) for index in indices[:, 0]) / 400 - (1 + 3 * 0.5)) < 0.2
    assert not torch.equal(indices[:, 0], indices[:, 1])


def test_bert_classifier_with_answer_network(tmp_path) -> None:
    """It can be saved, has no pooler, ignores padding, and requires pairs and several classes."""
    bert = FAMILIES["bert"]
    model = CtxBertForSequenceClassification(tiny_config(bert, num_labels=3, answer_steps=3)).eval()
    model.save_pretrained(tmp_path)
    loaded = CtxBertForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 8).view(2, 4)
    pair = {"input_ids": ids, "token_type_ids": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])}
    assert torch.equal(loaded(**pair).logits, model(**pair).logits)
    assert getattr(model.bert, "pooler", None) is None
    padded = {name: nn.functional.pad(value, (0, 3)) for name, value in pair.items()}
    mask = (padded["input_ids"] != 0).long()
    for name in ("attention_mask", "sequence_ids"):
        assert_close(loaded(**padded, **{name: mask}).logits, model(**pair).logits, name)
    with pytest.raises(CtxError, match="compares two texts"):
        model(ids)
    with pytest.raises(CtxError, match="one of several classes"):
        CtxBertForSequenceClassification(tiny_config(bert, num_labels=1, answer_steps=3))
    with pytest.raises(CtxError, match="does not support answer_steps"):
        model.export_reference(tmp_path)
