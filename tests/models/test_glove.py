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
