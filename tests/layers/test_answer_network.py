"""The stochastic answer network against a loop over rows and steps, its dropout of predictions, and what it refuses."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from zoo import FIRST_WORD, tiny_config

from hf_ctxmodels import FAMILIES, CtxBertForSequenceClassification, CtxError
from hf_ctxmodels.heads.answer_network import AnswerNetwork

SIZE, LABELS, STEPS = 6, 3, 4


def network(steps: int = STEPS, dropped: float = 0.0) -> AnswerNetwork:
    torch.manual_seed(0)
    made = AnswerNetwork(SIZE, LABELS, steps, dropout=0.0, prediction_dropout=dropped)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, mask and segments of three pairs, padded at both sides."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    return torch.randn(3, 6, SIZE, generator=torch.Generator().manual_seed(1)), mask, types


def by_loop(made: AnswerNetwork, states: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """(rows, steps, labels) predictions of each row alone, by torch's GRU cell."""
    cell = nn.GRUCell(SIZE, SIZE)
    cell.load_state_dict(
        {
            "weight_ih": made.input_gates.weight,
            "weight_hh": made.state_gates.weight,
            "bias_ih": made.input_gates.bias,
            "bias_hh": made.state_gates.bias,
        }
    )
    found = []
    for row in range(len(states)):
        first = states[row][(mask[row] == 1) & (types[row] == 0)]
        second = states[row][(mask[row] == 1) & (types[row] == 1)]
        state = (made.start(second)[:, 0].softmax(0)[:, None] * second).sum(0)
        for _ in range(made.steps):
            weights = torch.stack([token @ made.attention.weight @ state for token in first]).softmax(0)
            read = sum(weight * token for weight, token in zip(weights, first, strict=True))
            features = torch.cat([state, read, (state - read).abs(), state * read])
            found.append(made.classifier(features).softmax(0))
            state = cell(read[None], state[None])[0]
    return torch.stack(found).view(len(states), made.steps, LABELS)


def test_predictions_are_those_of_a_loop_and_some_are_dropped_in_training() -> None:
    made, given = network(), rows()
    expected = by_loop(made, *given)
    torch.testing.assert_close(made(*given).exp(), expected.mean(1), atol=1e-5, rtol=1e-5)
    expected = expected.detach()
    one_step = network(1)
    one_step.load_state_dict({name: value for name, value in made.state_dict().items() if "gates" not in name})
    torch.testing.assert_close(one_step(*given).exp(), expected[:, 0], atol=1e-5, rtol=1e-5)
    assert all(parameter.grad is None for parameter in made.parameters())
    made.train()(*given).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in made.parameters())

    made.prediction_dropout = 0.5
    drawn = torch.stack([made(*given).exp() for _ in range(400)]).detach()
    subsets = {
        kept: expected[0][[step for step in range(STEPS) if kept >> step & 1]].mean(0) for kept in range(1, 2**STEPS)
    }
    shown = [min(subsets, key=lambda kept: float((subsets[kept] - row).abs().max())) for row in drawn[:, 0]]
    errors = torch.stack([(subsets[kept] - row).abs().max() for kept, row in zip(shown, drawn[:, 0], strict=True)])
    assert errors.max() < 1e-5, "the mean over a subset of the steps, never over none"
    kept_steps = sum(kept.bit_count() for kept in shown) / 400
    assert abs(kept_steps - (1 + 3 * 0.5)) < 0.2, "one is always kept, the others with probability 1/2"
    assert not torch.equal(drawn[:, 0].argmax(-1), drawn[:, 1].argmax(-1)) or len(set(shown)) > 8


def test_the_head_of_a_family_has_it_and_refuses_what_is_no_pair_of_classes(tmp_path, subtests) -> None:
    config = tiny_config(FAMILIES["bert"], num_labels=3, answer_steps=3)
    model = CtxBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    opened = CtxBertForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 8).view(2, 4)
    pair = {"input_ids": ids, "token_type_ids": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])}
    assert torch.equal(opened(**pair).logits, model(**pair).logits)
    assert not hasattr(model.bert, "pooler") or model.bert.pooler is None
    padded = {name: nn.functional.pad(value, (0, 3)) for name, value in pair.items()}
    mask = nn.functional.pad(torch.ones_like(ids), (0, 3))
    torch.testing.assert_close(opened(**padded, attention_mask=mask).logits, model(**pair).logits, atol=1e-5, rtol=1e-5)
    refused = {
        "a single text": (lambda: model(ids), "compares two texts"),
        "a number": (
            lambda: CtxBertForSequenceClassification(tiny_config(FAMILIES["bert"], num_labels=1, answer_steps=3)),
            "one of several classes",
        ),
        "the layout of transformers": (lambda: model.export_reference(tmp_path), "does not support answer_steps"),
    }
    for what, (call, says) in refused.items():
        with subtests.test(what), pytest.raises(CtxError, match=says):
            call()
    with pytest.raises(StrictDataclassError, match="compares two segments"):
        tiny_config(FAMILIES["roberta"], answer_steps=3)
