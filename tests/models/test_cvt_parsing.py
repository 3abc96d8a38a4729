"""CVT's dependency parser: losses compared with loops, directions of the views, accumulation, saving, errors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from zoo import Case, make_batch

from hf_ctxmodels import AutoModelForDependencyParsing, CtxCvtForDependencyParsing, CtxCvtTokenizer, CtxError
from hf_ctxmodels.models.cvt.configuration_cvt import EDGE_VIEWS
from hf_ctxmodels.registry import FAMILIES

PARSER = Case(FAMILIES["cvt"], "AutoModelForDependencyParsing")
LENGTHS = (6, 3, 1, 5)
ROOT = -1


def make_edges(batch: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Random heads and relations; the first word of each sentence is the root, some words have no target."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch["attention_mask"]
    labels = torch.randint(3, mask.shape, generator=generator).masked_fill(mask == 0, -100)
    heads = torch.full_like(mask, ROOT)
    for row, is_word in enumerate(mask.bool()):
        columns = is_word.nonzero()[:, 0].tolist()
        for column in columns[1:]:
            others = [other for other in columns if other != column]
            heads[row, column] = others[int(torch.randint(len(others), (), generator=generator))]
    labels[0, 2] = -100
    return {"labels": labels, "heads": heads}


def probabilities(logits: Tensor) -> Tensor:
    """(heads, relations) scores of a word -> probabilities."""
    return logits.flatten().softmax(0).view(logits.shape)


def test_loss_equals_loop_over_words() -> None:
    model, batch = PARSER.model(num_hidden_layers=2), make_batch(PARSER, LENGTHS)
    edges = make_edges(batch)
    output = model(**batch, **edges)
    losses = []
    for row, column in (edges["labels"] != -100).nonzero().tolist():
        head, relation = edges["heads"][row, column], edges["labels"][row, column]
        losses.append(-probabilities(output.logits[row, column])[1 + head, relation].log())
    torch.testing.assert_close(output.loss, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)
    for row, length in enumerate(LENGTHS):
        sums = output.logits[row, :length, : 1 + length].flatten(1).softmax(-1).sum(-1)
        torch.testing.assert_close(sums, torch.ones(length))
    word = probabilities(output.logits[3, 2])
    torch.testing.assert_close(output.arc_scores[3, 2].exp(), word.amax(1))
    assert output.arc_relations[3, 2, :6].equal(word[:6].argmax(1))
    assert model.train()(**batch, **edges).arc_scores is None


def test_view_loss_equals_loop_over_views_and_words() -> None:
    """Divergence from the primary prediction, which has no gradient."""
    model, batch = PARSER.model(num_hidden_layers=2), make_batch(PARSER, LENGTHS)
    views = torch.where(make_edges(batch)["labels"] != -100, 1, -100)
    output = model(**batch, views=views)
    states = model.cvt(**batch, output_hidden_states=True).hidden_states[1]
    parsers = model.predictors["task"]
    view_scores = parsers.get_views(states, batch["attention_mask"])
    assert list(view_scores) == list(EDGE_VIEWS)
    teacher, total = model(**batch).logits, 0.0
    for row, column in (views == 1).nonzero().tolist():
        target = probabilities(teacher[row, column]).flatten()
        for scores in view_scores.values():
            prediction = scores[row, column].softmax(0)
            possible = target > 0
            total += (target[possible] * (target[possible] / prediction[possible]).log()).sum()
    torch.testing.assert_close(output.cross_view_loss, total / (views == 1).sum(), atol=1e-5, rtol=1e-4)
    output.loss.backward()
    names = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert any("auxiliary" in name for name in names)
    assert any("layers.0" in name for name in names)
    assert not any("primary" in name or "layers.1" in name for name in names)


@pytest.mark.parametrize("name", EDGE_VIEWS)
def test_views_see_single_direction(name: str) -> None:
    """A changed word changes forward states from the word on, and backward states up to the word."""
    model, batch = PARSER.model(num_hidden_layers=2, views=[name]), make_batch(PARSER, [7])
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    middle = 3
    changed["input_ids"][0, middle] = batch["input_ids"][0, 0]
    scores, changed_scores = (
        model.predictors["task"].get_views(
            model.cvt(**inputs, output_hidden_states=True).hidden_states[1], batch["attention_mask"]
        )[name][0]
        for inputs in (batch, changed)
    )
    words = torch.arange(7)
    sees_change = {"forward": words >= middle, "backward": words <= middle}
    head_direction, dependent_direction = name.split("_")
    edge_sees_change = sees_change[dependent_direction][:, None] | sees_change[head_direction][None, :]
    edge_sees_change &= ~torch.eye(7, dtype=torch.bool)
    differs = (scores != changed_scores).view(7, 8, -1).any(-1)
    assert differs[:, 1:].equal(edge_sees_change)
    assert differs[:, 0].equal(sees_change[dependent_direction])


def test_dropout_applies_only_to_students() -> None:
    model = PARSER.model(hidden_dropout_prob=0.5, word_dropout=0.5).train()
    batch = make_batch(PARSER, LENGTHS)
    views = torch.where(batch["attention_mask"] == 1, 1, -100)
    teacher_logits = []
    model.predictors["task"].register_forward_hook(lambda module, inputs, output: teacher_logits.append(output))
    losses = {float(model(**batch, views=views).cross_view_loss) for _ in range(3)}
    assert len(losses) == 3
    assert all(logits.equal(teacher_logits[0]) for logits in teacher_logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_accumulation(side: str) -> None:
    """Losses of single sentences sum to the loss of a batch, and logits do not depend on padding."""
    model, batch = PARSER.model(num_hidden_layers=2), make_batch(PARSER, LENGTHS, width=8, side=side)
    edges = make_edges(batch)
    views = batch["attention_mask"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, **edges, views=views)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    counts = {"labels": int((edges["labels"] != -100).sum()), "views": int((views == 1).sum())}
    total = 0.0
    for row in range(len(LENGTHS)):
        columns = batch["attention_mask"][row].nonzero()[:, 0]
        first = int(columns[0])
        inputs = {name: tensor[row : row + 1, columns] for name, tensor in {**batch, **edges, "views": views}.items()}
        inputs["heads"] = inputs["heads"].where(inputs["heads"] == ROOT, inputs["heads"] - first)
        single = model(**inputs, num_items_in_batch=counts)
        candidates = torch.cat([torch.tensor([0]), 1 + columns])
        torch.testing.assert_close(single.logits[0], output.logits[row][columns][:, candidates], atol=1e-5, rtol=1e-4)
        single.loss.backward()
        total += single.loss.detach()
    torch.testing.assert_close(total, output.loss.detach(), atol=1e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-3)


def test_start_and_end_of_sentence_are_no_heads() -> None:
    tokenizer = CtxCvtTokenizer.from_words([])
    batch = tokenizer(["a cat sat"], return_tensors="pt")
    logits = PARSER.model()(**batch).logits[0]
    is_excluded = (logits == torch.finfo(torch.float32).min).all(-1)
    assert is_excluded[1].tolist() == [False, True, True, False, False, True]


def test_save_and_load(tmp_path: Path) -> None:
    model, batch = PARSER.model(views=["forward_backward"]), make_batch(PARSER, LENGTHS)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForDependencyParsing.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, CtxCvtForDependencyParsing)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
    assert [*loaded.predictors["task"].auxiliary] == ["forward_backward_view"]
    logits, *_ = model(**batch, return_dict=False)
    torch.testing.assert_close(logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (None, "have no heads"),
        ([1, 6, 1], r"contains 6, outside \[-1, words=6\)"),
        ([1, -2, 1], "contains -2"),
        ([1, 1, 1], r"\(row, column\) \(1, 1\) is no other word"),
        ([1, 5, 1], r"\(row, column\) \(1, 1\) is no other word"),
    ],
)
def test_invalid_heads_raise(heads: list[int] | None, message: str) -> None:
    """Missing, out of range, the word itself, and padding."""
    model, batch = PARSER.model(), make_batch(PARSER, LENGTHS)
    edges = make_edges(batch)
    if heads is None:
        del edges["heads"]
    else:
        edges["heads"][1, :3] = torch.tensor(heads)
    with pytest.raises(CtxError, match=message):
        model(**batch, **edges)


def test_invalid_relations_raise() -> None:
    model, batch = PARSER.model(), make_batch(PARSER, LENGTHS)
    edges = make_edges(batch)
    edges["labels"][1, 0] = 3
    with pytest.raises(CtxError, match="num_labels=3"):
        model(**batch, **edges)
    with pytest.raises(CtxError, match="no task 'tags'"):
        model(**batch, task="tags")
