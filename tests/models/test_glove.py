"""Compiled AdaGrad of GloVe, one matrix cell per update, compared with torch's AdaGrad on single-cell batches."""

import pytest
import torch
from torch import Tensor

from hf_ctxmodels import CtxError, CtxGloveConfig, CtxGloveForPreTraining

pytest.importorskip("numba")
RATE = 0.1


@pytest.fixture
def model() -> CtxGloveForPreTraining:
    torch.manual_seed(0)
    return CtxGloveForPreTraining(CtxGloveConfig(vocab_size=9, hidden_size=7, x_max=3.0, pad_token_id=0))


@pytest.fixture
def cells() -> dict[str, Tensor]:
    """Two rows of cells, the second shorter; some cells occur twice."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, 9, (2, 20), generator=generator) for _ in range(2))
    labels[1, 12:] = -100
    values = torch.rand(2, 20, generator=generator) * 6 + 0.1
    return {"input_ids": ids, "labels": labels, "cooccurrences": values, "attention_mask": (labels != -100).long()}


def zero_sums(model: CtxGloveForPreTraining) -> dict[str, Tensor]:
    return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}


def test_updates_match_adagrad_with_one_cell_per_step(model, cells) -> None:
    initial_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    losses = []
    for row, column in (cells["labels"] != -100).nonzero().tolist():
        cell = {name: value[row : row + 1, column : column + 1] for name, value in cells.items()}
        optimizer.zero_grad()
        losses.append(model(**cell).loss)
        losses[-1].backward()
        optimizer.step()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(initial_weights)
    sums = zero_sums(model)
    loss = model(**cells, learning_rate=RATE, squares=sums).loss
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    assert not any(torch.equal(weight, initial_weights[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=1e-4, atol=1e-5)
    expected_sums = {name: optimizer.state[parameter]["sum"] for name, parameter in model.named_parameters()}
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-6)


def test_updates_match_released_code(model, cells) -> None:
    """The loop of glove.c at its rate, which is AdaGrad at the rate 1 from sums of 1 / rate^2, except that its sums
    exclude the present gradient."""
    rate = 0.05
    names = ("glove.word_embeddings", "glove.context_embeddings", "word_bias", "context_bias")
    initial = {name: model.state_dict()[f"{name}.weight"].double().clone() for name in names}
    weights = {name: weight.clone() for name, weight in initial.items()}
    squares = {name: torch.ones_like(weight) for name, weight in weights.items()}
    for row, column in (cells["labels"] != -100).nonzero().tolist():
        i, j, count = (cells[name][row, column] for name in ("input_ids", "labels", "cooccurrences"))
        word, context, word_bias, context_bias = (weights[name][id] for name, id in zip(names, (i, j, i, j)))
        error = word @ context + word_bias + context_bias - count.double().log()
        scaled = rate * min(1.0, float(count) / 3.0) ** 0.75 * error
        updates = zip(names, (i, j, i, j), (scaled * context, scaled * word, scaled, scaled), strict=True)
        for name, id, update in [(name, id, update.clone()) for name, id, update in updates]:
            weights[name][id] -= update / squares[name][id].sqrt()
            squares[name][id] += update**2
    sums = {name: torch.full_like(parameter, 1 / rate**2) for name, parameter in model.named_parameters()}
    model(**cells, learning_rate=1.0, squares=sums)
    for name in names:
        change = model.state_dict()[f"{name}.weight"].double() - initial[name]
        expected = weights[name] - initial[name]
        assert float((change - expected).norm() / expected.norm()) < 0.01


def test_loss_with_several_threads(model, cells) -> None:
    initial_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses = []
    for num_threads in (1, 3):
        model.load_state_dict(initial_weights)
        model.config.update_threads = num_threads
        sums = zero_sums(model)
        losses.append([float(model(**cells, learning_rate=RATE, squares=sums).loss) for _ in range(20)][-1])
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_missing_sums_of_squares_raise(model, cells) -> None:
    with pytest.raises(CtxError, match="sums of squared gradients"):
        model(**cells, learning_rate=RATE)


def test_batch_of_ignored_cells(model, cells) -> None:
    """The loss is 0, and nothing is updated."""
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    cells["labels"] = torch.full_like(cells["labels"], -100)
    assert model(**cells).loss == model(**cells, learning_rate=RATE, squares=zero_sums(model)).loss == 0
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)


def test_counts_must_be_positive(model, cells) -> None:
    cells["cooccurrences"][1, 12:] = 0  # ignored
    assert torch.isfinite(model(**cells).loss)
    cells["cooccurrences"][1, 11] = 0
    for options in ({}, {"learning_rate": RATE, "squares": zero_sums(model)}):
        with pytest.raises(CtxError, match="counts of 0 or less"):
            model(**cells, **options)
