"""The parts of replaced token detection against their formulas."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.lm_loss import cross_entropy as prediction
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead
from hf_ctxmodels.layers.lm_loss.sampling import sample_categorical, uniforms
from hf_ctxmodels.models.electra import replaced_token_detection as replaced_token
from hf_ctxmodels.models.electra.replaced_token_detection import (
    copy_or_predict_loss,
    detection_counts,
    detection_loss,
    fill_masked,
)

WIDTH, WORDS = 8, 40


@pytest.fixture
def head() -> MaskedLMHead:
    torch.manual_seed(0)
    head = MaskedLMHead(WIDTH, WIDTH, WORDS, activation="gelu", layer_norm_eps=1e-5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return head


def masked_batch() -> tuple[Tensor, Tensor, Tensor]:
    """input_ids and labels (3, 6), and random states (targets, width)."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(WORDS, (3, 6), generator=generator)
    masked = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]).bool()
    input_ids = labels.masked_fill(masked, 3)
    return input_ids, labels.masked_fill(~masked, -100), torch.randn(5, WIDTH, generator=generator)


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_fills_every_mask_with_a_draw_from_the_softmax(
    head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """In chunks of any size: loss, draws and right guesses are those of the full logits."""
    monkeypatch.setattr(prediction, "CHUNK_ELEMENTS", rows * WORDS)
    input_ids, labels, states = masked_batch()
    seeds = torch.tensor([11, 12, 13])
    filled = fill_masked(states, head, input_ids, labels, seeds)
    logits, targets = head(states), labels[labels != -100]
    torch.testing.assert_close(filled.loss, F.cross_entropy(logits, targets, reduction="sum"))
    numbers = uniforms(torch.tensor([11, 11, 11, 13, 13]), torch.tensor([0, 1, 2, 0, 1]))
    drawn = sample_categorical(logits.softmax(-1), numbers)
    assert torch.equal(filled.input_ids[labels != -100], drawn)
    assert torch.equal(filled.input_ids[labels == -100], input_ids[labels == -100])
    assert filled.correct == (logits.argmax(-1) == targets).sum()
    wanted = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), list(head.parameters()))
    for got, expected in zip(torch.autograd.grad(filled.loss, list(head.parameters())), wanted, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("given", [True, False])
def test_a_row_draws_the_same_whatever_surrounds_it(head: MaskedLMHead, given: bool) -> None:
    """Other rows, their order, and padding on either side; with seeds, and with those made of the rows' tokens."""
    input_ids, labels, states = masked_batch()
    seeds = torch.tensor([5, 6, 7]) if given else None
    together = fill_masked(states, head, input_ids, labels, seeds).input_ids
    alone = fill_masked(states[3:], head, input_ids[2:], labels[2:], None if seeds is None else seeds[2:]).input_ids
    assert torch.equal(alone[0], together[2])
    wide = fill_masked(states, head, F.pad(input_ids, (4, 3)), F.pad(labels, (4, 3), value=-100), seeds).input_ids
    assert torch.equal(wide[:, 4:-3], together)
    assert not wide[:, :4].any()


def test_seeds_made_of_rows_differ() -> None:
    """By the word behind a mask, by where in the order of masks it stands, and by what stands in its place."""
    labels = torch.tensor([[5, 6, -100], [6, 5, -100], [5, 7, -100], [5, 6, -100]])
    input_ids = torch.tensor([[3, 3, 9], [3, 3, 9], [3, 3, 9], [3, 6, 9]])
    seeds = replaced_token._derive_seeds(input_ids, labels, (labels != -100).cumsum(1) - 1)
    assert len(seeds.unique()) == 4


def test_no_mask_at_all(head: MaskedLMHead) -> None:
    input_ids = torch.randint(WORDS, (2, 4))
    filled = fill_masked(torch.zeros(0, WIDTH), head, input_ids, torch.full((2, 4), -100))
    assert torch.equal(filled.input_ids, input_ids)
    assert filled.loss == 0
    assert filled.correct == 0


def test_detection() -> None:
    logits = torch.tensor([2.0, 1.0, -1.0, -2.0, 3.0])
    replaced = torch.tensor([True, False, True, False, True])
    counts = {name: value.tolist() for name, value in detection_counts(logits, replaced).items()}
    assert counts == {"precision": [2, 3], "recall": [2, 3], "f1": [4, 6], "share": [3, 5]}
    expected = -sum(torch.log(torch.sigmoid(x if y else -x)) for x, y in zip(logits, replaced))
    torch.testing.assert_close(detection_loss(logits, replaced), expected)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_copy_or_predict(head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """D on the token read and 1 - D times the softmax, in chunks of any size, gradients too."""
    monkeypatch.setattr(replaced_token, "CHUNK_ELEMENTS", rows * WORDS)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(7, WIDTH, generator=generator).requires_grad_()
    gate = torch.randn(7, generator=generator).requires_grad_()
    original = torch.randint(WORDS, (7,), generator=generator)
    read = torch.where(torch.arange(7) < 4, original, (original + 1) % WORDS)
    copy = torch.sigmoid(gate)
    chance = (1 - copy) * head(states).softmax(-1)[torch.arange(7), original] + copy * (read == original)
    expected, got = -chance.log().sum(), copy_or_predict_loss(head, gate, states, read, original)
    torch.testing.assert_close(got, expected)
    leaves = [states, gate, *head.parameters()]
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
