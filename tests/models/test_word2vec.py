"""word2vec: matrix form of the loss compared with loops over pairs, and in-place updates with autograd."""

import math

import pytest
import torch
from torch import Tensor

from hf_ctxmodels import CtxError, CtxWord2VecConfig, CtxWord2VecForPreTraining
from hf_ctxmodels.models.word2vec.window_prediction import (
    Blocks,
    TextBatch,
    build_blocks,
    sgd_step,
    sgd_step_by_words,
    summed_loss,
)

VOCABULARY, WIDTH, WINDOW, NEGATIVE, DEPTH = 23, 6, 3, 5, 4
LENGTHS = (12, 7, 1)
AVERAGE = pytest.mark.parametrize("average", [False, True], ids=["skip-gram", "cbow"])


def random_ids(high: int, shape: tuple[int, ...], low: int = 0, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three texts of at most twelve words in blocks of four; one position has no label."""
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    ids = random_ids(VOCABULARY, (3, 12), low=1).masked_fill(~mask, 0)
    labels = ids.masked_fill(~mask, -100)
    labels[0, 5] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "windows": random_ids(WINDOW + 1, (3, 12), low=1, seed=1),
        "negatives": random_ids(VOCABULARY, (3, 3, 2), seed=2),
        "paths": random_ids(VOCABULARY, (3, 3, 4, DEPTH), low=-1, seed=3),
        "codes": random_ids(2, (3, 3, 4, DEPTH), seed=4),
    }


@pytest.fixture
def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    words, outputs = (torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return words, outputs


def text_batch(batch: dict[str, Tensor], output: str) -> TextBatch:
    ids, mask, labels, windows = (batch[name] for name in ("input_ids", "attention_mask", "labels", "windows"))
    names = {"negatives": ["negatives"], "tree": ["paths", "codes"], "softmax": []}[output]
    return TextBatch(ids, mask == 1, labels, windows, {name: batch[name] for name in names})


def make_blocks(batch: dict[str, Tensor], output: str, average: bool) -> Blocks:
    return build_blocks(text_batch(batch, output), WINDOW, NEGATIVE, average, torch.float64)


def log_sigmoid(score: Tensor) -> float:
    return -math.log1p(math.exp(-float(score)))


def reference_loss(batch: dict[str, Tensor], words: Tensor, outputs: Tensor, output: str, average: bool) -> float:
    """The loss of the papers, by loops over target words and their predictors."""
    loss = 0.0
    for row in range(3):
        for position in range(12):
            label = int(batch["labels"][row, position])
            if label == -100:
                continue
            radius = int(batch["windows"][row, position])
            predictors = [
                words[batch["input_ids"][row, neighbor]]
                for neighbor in range(max(0, position - radius), min(12, position + radius + 1))
                if neighbor != position and batch["attention_mask"][row, neighbor]
            ]
            if average and predictors:
                predictors = [torch.stack(predictors).mean(0)]
            block, column = divmod(position, 4)
            for predictor in predictors:
                if output == "softmax":
                    loss -= float((outputs @ predictor).log_softmax(0)[label])
                elif output == "negatives":
                    loss -= log_sigmoid(predictor @ outputs[label])
                    for negative in batch["negatives"][row, block].tolist():
                        if negative != label:
                            loss -= NEGATIVE / 2 * log_sigmoid(-predictor @ outputs[negative])
                else:
                    nodes = batch["paths"][row, block, column].tolist()
                    for node, code in zip(nodes, batch["codes"][row, block, column].tolist()):
                        if node >= 0:
                            loss -= log_sigmoid((1 - 2 * code) * (predictor @ outputs[node]))
    return loss


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree", "softmax"])
def test_loss_matches_sum_over_pairs(batch, tables, output: str, average: bool) -> None:
    loss = summed_loss(make_blocks(batch, output, average), *tables)
    assert float(loss) == pytest.approx(reference_loss(batch, *tables, output, average), rel=1e-6)


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree", "softmax"])
def test_sgd_step_matches_autograd(batch, tables, output: str, average: bool) -> None:
    blocks = make_blocks(batch, output, average)
    words, outputs = (table.clone().requires_grad_() for table in tables)
    loss = summed_loss(blocks, words, outputs)
    loss.backward()
    updated = [table.clone() for table in tables]
    step_loss = sgd_step(blocks, *updated, rate=0.1)
    assert float(step_loss) == pytest.approx(float(loss), rel=1e-5)
    assert words.grad.any()
    assert outputs.grad.any()
    expected = [table - 0.1 * table.grad for table in (words, outputs)]
    torch.testing.assert_close(updated, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [5, 16, 37])
def test_softmax_gradients_match_loss_over_pairs(tables, length: int) -> None:
    """Skip-gram with full softmax, compared with the cross-entropy over pairs, for several lengths."""
    ids = random_ids(VOCABULARY, (2, length), low=1)
    windows = random_ids(WINDOW + 1, (2, length), low=1, seed=1)
    words, outputs = (table.clone().requires_grad_() for table in tables)
    text = TextBatch(ids, ids > 0, ids, windows, {})
    loss = summed_loss(build_blocks(text, WINDOW, NEGATIVE, False, torch.float64), words, outputs)
    gradients = torch.autograd.grad(loss, (words, outputs))
    pairs = [
        (ids[row, neighbor], ids[row, position])
        for row in range(2)
        for position in range(length)
        for neighbor in range(length)
        if 0 < abs(position - neighbor) <= windows[row, position]
    ]
    predictors, labels = torch.tensor(pairs).T
    expected = torch.nn.functional.cross_entropy(words[predictors] @ outputs.T, labels, reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    expected_gradients = torch.autograd.grad(expected, (words, outputs))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@AVERAGE
def test_softmax_loss_decreases(batch, tables, average: bool) -> None:
    """The initial loss is that of a uniform distribution over the vocabulary."""
    blocks = make_blocks(batch, "softmax", average)
    words, outputs = tables[0], torch.zeros_like(tables[1])
    losses = [float(sgd_step(blocks, words, outputs, rate=0.05)) for _ in range(40)]
    predictions = float(blocks.weights.sum())
    assert losses[0] == pytest.approx(predictions * math.log(VOCABULARY), rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]


def test_cbow_words_get_undivided_gradient(tables) -> None:
    """As in the released code: the gradient of the mean is not divided by the number of words."""
    ids = torch.tensor([[3, 7, 4]])
    labels = torch.tensor([[-100, 7, -100]])
    text = TextBatch(ids, ids > 0, labels, torch.ones_like(ids), {"negatives": torch.tensor([[[5]]])})
    blocks = build_blocks(text, 1, 1, True, torch.float64)
    words = tables[0].clone().requires_grad_()
    summed_loss(blocks, words, tables[1]).backward()
    mean = tables[0][[3, 4]].mean(0)
    target, negative = tables[1][7], tables[1][5]
    expected = (torch.sigmoid(mean @ target) - 1) * target + torch.sigmoid(mean @ negative) * negative
    torch.testing.assert_close(words.grad[[3, 4]], expected.expand(2, -1), rtol=1e-5, atol=1e-6)


def test_blocks_without_labels_are_omitted(batch, tables) -> None:
    assert len(make_blocks(batch, "negatives", False)) == 3 + 2 + 1


def test_blocks_must_divide_length(batch) -> None:
    batch["negatives"] = random_ids(VOCABULARY, (3, 5, 2))
    with pytest.raises(CtxError, match="12 columns cannot be split into 5"):
        make_blocks(batch, "negatives", False)


@pytest.mark.parametrize("options", [{}, {"learning_rate": 0.1}], ids=["autograd", "in place"])
def test_invalid_arguments(batch, options: dict[str, float]) -> None:
    """Of arguments that do not fit the text, in-place updates would read other memory."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "window": WINDOW}
    for output, name, value, message in (
        ("hierarchical-softmax", "paths", batch["paths"][:2], r"paths is \(2, 3, 4, 4\)"),
        ("hierarchical-softmax", "paths", batch["paths"][:, :, :3], r"paths is \(3, 3, 3, 4\)"),
        ("negative-sampling", "negatives", batch["negatives"][:, :0], "negatives is .* not empty"),
        ("negative-sampling", "negatives", batch["negatives"][..., :0], "negatives is .* not empty"),
        ("softmax", "windows", batch["windows"] + WINDOW, "windows has values outside 0 to config.window=3"),
    ):
        model = CtxWord2VecForPreTraining(CtxWord2VecConfig(**shape, output=output))
        arguments = batch | {name: value}
        if name == "paths":
            arguments["codes"] = torch.zeros_like(value)
        with pytest.raises(CtxError, match=message):
            model(**arguments, **options)


def test_large_scores_have_finite_loss(batch, tables) -> None:
    large_tables = [table * 1e4 for table in tables]
    assert torch.isfinite(sgd_step(make_blocks(batch, "negatives", False), *large_tables, rate=0.0))
    pytest.importorskip("numba")
    tables = [table.float() for table in large_tables]
    assert math.isfinite(sgd_step_by_words(text_batch(batch, "negatives"), *tables, 0.0, NEGATIVE, False))


def reference_updates(batch: dict[str, Tensor], words: Tensor, outputs: Tensor, output: str, average: bool) -> float:
    """`sgd_step` on one target word at a time, in the order of the text; updates the tables and returns the loss."""
    loss = 0.0
    for row in range(3):
        for position in range(12):
            text = {name: tensor[row : row + 1].clone() for name, tensor in batch.items()}
            text["labels"][:, :position], text["labels"][:, position + 1 :] = -100, -100
            masks = [text["attention_mask"]]
            if not average:  # skip-gram: one predictor at a time
                masks = [mask_of(text, position, neighbor) for neighbor in range(12) if neighbor != position]
            for mask in masks:
                blocks = make_blocks({**text, "attention_mask": mask}, output, average)
                if len(blocks):
                    loss += float(sgd_step(blocks, words, outputs, rate=0.1))
    return loss


def mask_of(text: dict[str, Tensor], *positions: int) -> Tensor:
    """The attention mask restricted to the given positions."""
    mask = torch.zeros_like(text["attention_mask"])
    mask[:, positions] = text["attention_mask"][:, positions]
    return mask


@AVERAGE
@pytest.mark.parametrize("output", ["negatives", "tree"])
def test_compiled_updates_match_sgd_steps(batch, tables, output: str, average: bool) -> None:
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(2)  # repeated ids would depend on the previous update
    distinct_ids = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(3 * 12)])
    batch["negatives"] = distinct_ids[:9, :7].view(3, 3, 7)
    batch["paths"] = distinct_ids[:, :DEPTH].reshape(3, 3, 4, DEPTH).masked_fill(batch["paths"] < 3, -1)
    expected = [table.clone() for table in tables]
    expected_loss = reference_updates(batch, *expected, output, average)
    updated = [table.float() for table in tables]
    text = text_batch(batch, output)
    loss = sgd_step_by_words(text, *updated, 0.1, NEGATIVE, average)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    torch.testing.assert_close([table.double() for table in updated], expected, rtol=1e-3, atol=1e-4)


@AVERAGE
def test_compiled_updates_with_many_negatives(batch, tables, average: bool) -> None:
    pytest.importorskip("numba")
    batch["negatives"] = random_ids(VOCABULARY, (3, 3, 3000), seed=2)
    text = text_batch(batch, "negatives")
    updated = [table.float() for table in tables]
    expected = sgd_step(make_blocks(batch, "negatives", average), *tables, rate=0.0)
    assert sgd_step_by_words(text, *updated, 0.0, NEGATIVE, average) == pytest.approx(float(expected), rel=1e-4)
