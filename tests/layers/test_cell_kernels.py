"""AdaGrad cell by cell, compiled, against torch's AdaGrad with batches of one cell."""

from collections.abc import Iterator

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
    """Two rows of cells, the second shorter; some come twice."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, 9, (2, 20), generator=generator) for _ in range(2))
    labels[1, 12:] = -100
    values = torch.rand(2, 20, generator=generator) * 6 + 0.1
    return {"input_ids": ids, "labels": labels, "cooccurrences": values, "attention_mask": (labels != -100).long()}


def squares(model: CtxGloveForPreTraining) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in model.named_parameters()}


def one_by_one(cells: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for row in range(2):
        for column in range(20):
            if cells["labels"][row, column] != -100:
                yield {name: each[row : row + 1, column : column + 1] for name, each in cells.items()}


def test_it_is_adagrad_on_one_cell_after_the_other(model, cells) -> None:
    start = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    expected = []
    for cell in one_by_one(cells):
        optimizer.zero_grad()
        loss = model(**cell).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    reference = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(start)
    sums = squares(model)
    got = model(**cells, learning_rate=RATE, squares=sums).loss
    assert not got.requires_grad
    assert float(got) == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    for name, value in model.state_dict().items():
        assert not torch.equal(value, start[name]), name
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5, msg=name)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[name], optimizer.state[parameter]["sum"], rtol=1e-4, atol=1e-6, msg=name)


def test_threads_come_to_about_the_same(model, cells) -> None:
    losses = {}
    start = {name: each.clone() for name, each in model.state_dict().items()}
    for threads in (1, 3):
        model.load_state_dict(start)
        model.config.update_threads = threads
        sums = squares(model)
        losses[threads] = [float(model(**cells, learning_rate=RATE, squares=sums).loss) for _ in range(20)][-1]
    assert losses[3] == pytest.approx(losses[1], rel=0.1)


def test_sums_of_squares_are_needed(model, cells) -> None:
    with pytest.raises(CtxError, match="sums of squared gradients"):
        model(**cells, learning_rate=RATE)
