"""The grids of neighbouring words against loops over pairs, and the update in place against autograd."""

import math

import pytest
import torch
from torch import Tensor

from hf_ctxmodels import CtxError
from hf_ctxmodels.models.word2vec import window_prediction
from hf_ctxmodels.models.word2vec.window_prediction import Blocks

VOCABULARY, WIDTH, WINDOW, NEGATIVE, DEPTH = 23, 6, 3, 5, 4
LENGTHS = (12, 7, 1)
AVERAGE = pytest.mark.parametrize("average", [False, True], ids=["skip-gram", "cbow"])


def draw(high: int, shape: tuple[int, ...], low: int = 0, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three rows of twelve columns in blocks of four, with a hole in the labels."""
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    ids = draw(VOCABULARY, (3, 12), low=1).masked_fill(~mask, 0)
    labels = ids.masked_fill(~mask, -100)
    labels[0, 5] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "windows": draw(WINDOW + 1, (3, 12), low=1, seed=1),
        "negatives": draw(VOCABULARY, (3, 3, 2), seed=2),
        "paths": draw(VOCABULARY, (3, 3, 4, DEPTH), low=-1, seed=3),
        "codes": draw(2, (3, 3, 4, DEPTH), seed=4),
    }


@pytest.fixture
def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    words, outputs = (torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return words, outputs


def grid(batch: dict[str, Tensor], output: str, average: bool) -> Blocks:
    given = [batch["negatives"]] if output == "negatives" else [batch["paths"], batch["codes"]]
    four = (batch[name] for name in ("input_ids", "attention_mask", "labels", "windows"))
    centers = window_prediction.split_into_blocks(*four, WINDOW, given, torch.float64)
    if output == "negatives":
        return window_prediction.negative_sampling_grid(centers, NEGATIVE, average)
    return window_prediction.hierarchical_grid(centers, average)


def log_sigmoid(score: Tensor) -> float:
    return -math.log1p(math.exp(-float(score)))


def loss_by_loops(batch: dict[str, Tensor], words: Tensor, outputs: Tensor, output: str, average: bool) -> float:
    """The loss as the paper states it: for each word to be predicted, for each of its predictors."""
    loss = 0.0
    for row in range(3):
        for place in range(12):
            label = int(batch["labels"][row, place])
            if label == -100:
                continue
            radius = int(batch["windows"][row, place])
            near = [
                words[batch["input_ids"][row, other]]
                for other in range(max(0, place - radius), min(12, place + radius + 1))
                if other != place and batch["attention_mask"][row, other]
            ]
            if average and near:
                near = [torch.stack(near).mean(0)]
            block, column = divmod(place, 4)
            for predictor in near:
                if output == "negatives":
                    loss -= log_sigmoid(predictor @ outputs[label])
                    for drawn in batch["negatives"][row, block].tolist():
                        if drawn != label:
                            loss -= NEGATIVE / 2 * log_sigmoid(-predictor @ outputs[drawn])
                else:
                    nodes = batch["paths"][row, block, column].tolist()
                    for node, code in zip(nodes, batch["codes"][row, block, column].tolist()):
                        if node >= 0:
                            loss -= log_sigmoid((1 - 2 * code) * (predictor @ outputs[node]))
    return loss


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree"])
def test_loss_is_the_sum_over_pairs(batch, tables, output: str, average: bool) -> None:
    got = window_prediction.summed_loss(grid(batch, output, average), *tables)
    assert float(got) == pytest.approx(loss_by_loops(batch, *tables, output, average), rel=1e-6)


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree"])
def test_update_in_place_is_a_step_of_gradient_descent(batch, tables, output: str, average: bool) -> None:
    blocks = grid(batch, output, average)
    words, outputs = (table.clone().requires_grad_() for table in tables)
    loss = window_prediction.summed_loss(blocks, words, outputs)
    loss.backward()
    updated = [table.clone() for table in tables]
    before = window_prediction.sgd_step(blocks, *updated, rate=0.1)
    assert float(before) == pytest.approx(float(loss), rel=1e-5)
    for got, table in zip(updated, (words, outputs)):
        assert not torch.equal(got, table)
        torch.testing.assert_close(got, table - 0.1 * table.grad, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_mean_goes_whole_to_each_word(tables) -> None:
    """As in the released code: the same as for the sum, at the mean's score."""
    ids = torch.tensor([[3, 7, 4]])
    labels = torch.tensor([[-100, 7, -100]])
    centers = window_prediction.split_into_blocks(ids, None, labels, None, 1, [torch.tensor([[[5]]])], torch.float64)
    blocks = window_prediction.negative_sampling_grid(centers, 1, True)
    words = tables[0].clone().requires_grad_()
    window_prediction.summed_loss(blocks, words, tables[1]).backward()
    mean = tables[0][[3, 4]].mean(0)
    right, drawn = tables[1][7], tables[1][5]
    expected = (torch.sigmoid(mean @ right) - 1) * right + torch.sigmoid(mean @ drawn) * drawn
    torch.testing.assert_close(words.grad[3], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(words.grad[4], expected, rtol=1e-5, atol=1e-6)


def test_blocks_without_labels_are_left_out(batch, tables) -> None:
    assert len(grid(batch, "negatives", False)) == 3 + 2 + 1


def test_blocks_that_do_not_divide_a_row(batch) -> None:
    batch["negatives"] = draw(VOCABULARY, (3, 5, 2))
    with pytest.raises(CtxError, match="12 columns cannot be split into 5"):
        grid(batch, "negatives", False)


def test_a_certain_error_has_a_finite_loss(batch, tables) -> None:
    huge = [table * 1e4 for table in tables]
    assert torch.isfinite(window_prediction.sgd_step(grid(batch, "negatives", False), *huge, rate=0.0))


def one_by_one(batch: dict[str, Tensor], words: Tensor, outputs: Tensor, output: str, average: bool) -> float:
    """`sgd_step` with one word to be predicted at a time, in the order of the text; the tables are updated."""
    loss = 0.0
    for row in range(3):
        for place in range(12):
            one = {name: rows[row : row + 1].clone() for name, rows in batch.items()}
            one["labels"][:, :place], one["labels"][:, place + 1 :] = -100, -100
            if average:
                blocks = [grid(one, output, average)]
            else:  # skip-gram: and one predictor at a time
                near = [other for other in range(12) if other != place]
                blocks = [grid({**one, "attention_mask": only(one, place, other)}, output, average) for other in near]
            for each in blocks:
                if len(each):
                    loss += float(window_prediction.sgd_step(each, words, outputs, rate=0.1))
    return loss


def only(one: dict[str, Tensor], place: int, other: int) -> Tensor:
    """The mask with no other neighbour."""
    mask = torch.zeros_like(one["attention_mask"])
    mask[:, [place, other]] = one["attention_mask"][:, [place, other]]
    return mask


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree"])
def test_word_by_word_is_descent_word_by_word(batch, tables, output: str, average: bool) -> None:
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(2)  # nothing twice: the second would see the change by the first
    different = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(3 * 12)])
    batch["negatives"] = different[:9, :7].view(3, 3, 7)
    batch["paths"] = different[:, :DEPTH].reshape(3, 3, 4, DEPTH).masked_fill(batch["paths"] < 3, -1)
    expected = [table.clone() for table in tables]
    wanted = one_by_one(batch, *expected, output, average)
    got = [table.float() for table in tables]
    given = [batch["negatives"]] if output == "negatives" else [batch["paths"], batch["codes"]]
    text = window_prediction.TextBatch(
        *(batch[name] for name in ("input_ids", "attention_mask", "labels", "windows")), given
    )
    loss = window_prediction.sgd_step_by_words(text, *got, 0.1, WINDOW, NEGATIVE, average)
    assert loss == pytest.approx(wanted, rel=1e-4)
    for mine, reference in zip(got, expected):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-3, atol=1e-4)


@AVERAGE
def test_word_by_word_takes_any_number_of_negatives(batch, tables, average: bool) -> None:
    pytest.importorskip("numba")
    batch["negatives"] = draw(VOCABULARY, (3, 3, 3000), seed=2)
    text = window_prediction.TextBatch(
        *(
            batch[n]
            for n in (
                "input_ids",
                "attention_mask",
                "labels",
                "windows",
            )
        ),
        [batch["negatives"]],
    )
    got = [table.float() for table in tables]
    expected = window_prediction.sgd_step(grid(batch, "negatives", average), *tables, rate=0.0)
    assert window_prediction.sgd_step_by_words(text, *got, 0.0, WINDOW, NEGATIVE, average) == pytest.approx(
        float(expected), rel=1e-4
    )


def test_word_by_word_has_a_finite_loss(batch, tables) -> None:
    pytest.importorskip("numba")
    huge = [(table * 1e4).float() for table in tables]
    text = window_prediction.TextBatch(batch["input_ids"], None, batch["labels"], None, [batch["negatives"]])
    assert math.isfinite(window_prediction.sgd_step_by_words(text, *huge, 0.0, WINDOW, NEGATIVE, False))
