"""ELECTRA's replaced token detection: sampling and losses against their formulas."""

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

WIDTH, VOCAB_SIZE = 8, 40


@pytest.fixture
def head() -> MaskedLMHead:
    torch.manual_seed(0)
    head = MaskedLMHead(WIDTH, WIDTH, VOCAB_SIZE, activation="gelu", layer_norm_eps=1e-5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return head


def masked_batch() -> tuple[Tensor, Tensor, Tensor]:
    """input_ids and labels (3, 6), and random states (targets, width)."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB_SIZE, (3, 6), generator=generator)
    masked = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]).bool()
    input_ids = labels.masked_fill(masked, 3)
    return input_ids, labels.masked_fill(~masked, -100), torch.randn(5, WIDTH, generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 2, 100])
def test_samples_and_loss_of_the_generator(
    head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    """In chunks of any size: loss, samples and accuracy equal those of the full logits."""
    monkeypatch.setattr(prediction, "CHUNK_ELEMENTS", chunk_size * VOCAB_SIZE)
    input_ids, labels, states = masked_batch()
    seeds = torch.tensor([11, 12, 13])
    filled = fill_masked(states, head, input_ids, labels, seeds)
    logits, targets = head(states), labels[labels != -100]
    torch.testing.assert_close(filled.loss, F.cross_entropy(logits, targets, reduction="sum"))
    numbers = uniforms(torch.tensor([11, 11, 11, 13, 13]), torch.tensor([0, 1, 2, 0, 1]))
    samples = sample_categorical(logits.softmax(-1), numbers)
    assert torch.equal(filled.input_ids[labels != -100], samples)
    assert torch.equal(filled.input_ids[labels == -100], input_ids[labels == -100])
    assert filled.correct == (logits.argmax(-1) == targets).sum()
    parameters = list(head.parameters())
    expected_gradients = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), parameters)
    for gradient, expected in zip(torch.autograd.grad(filled.loss, parameters), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("seeded", [True, False])
def test_samples_do_not_depend_on_other_examples_and_padding(head: MaskedLMHead, seeded: bool) -> None:
    """With given seeds, and with seeds derived from the tokens."""
    input_ids, labels, states = masked_batch()
    seeds = torch.tensor([5, 6, 7]) if seeded else None
    batch_ids = fill_masked(states, head, input_ids, labels, seeds).input_ids
    single_ids = fill_masked(
        states[3:], head, input_ids[2:], labels[2:], None if seeds is None else seeds[2:]
    ).input_ids
    assert torch.equal(single_ids[0], batch_ids[2])
    padded_ids = fill_masked(states, head, F.pad(input_ids, (4, 3)), F.pad(labels, (4, 3), value=-100), seeds).input_ids
    assert torch.equal(padded_ids[:, 4:-3], batch_ids)
    assert not padded_ids[:, :4].any()


def test_derived_seeds_differ() -> None:
    """By the masked token, its position among the masked tokens, and the token in its place."""
    labels = torch.tensor([[5, 6, -100], [6, 5, -100], [5, 7, -100], [5, 6, -100]])
    input_ids = torch.tensor([[3, 3, 9], [3, 3, 9], [3, 3, 9], [3, 6, 9]])
    seeds = replaced_token._derive_seeds(input_ids, labels, (labels != -100).cumsum(1) - 1)
    assert len(seeds.unique()) == 4


def test_no_masked_token(head: MaskedLMHead) -> None:
    input_ids = torch.randint(VOCAB_SIZE, (2, 4))
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


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_copy_or_predict(head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, chunk_size: int) -> None:
    """Loss and gradients in chunks of any size."""
    monkeypatch.setattr(replaced_token, "CHUNK_ELEMENTS", chunk_size * VOCAB_SIZE)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(7, WIDTH, generator=generator).requires_grad_()
    gate = torch.randn(7, generator=generator).requires_grad_()
    original = torch.randint(VOCAB_SIZE, (7,), generator=generator)
    corrupted = torch.where(torch.arange(7) < 4, original, (original + 1) % VOCAB_SIZE)
    copy = torch.sigmoid(gate)
    predict = head(states).softmax(-1)[torch.arange(7), original]
    expected = -((1 - copy) * predict + copy * (corrupted == original)).log().sum()
    loss = copy_or_predict_loss(head, gate, states, corrupted, original)
    torch.testing.assert_close(loss, expected)
    leaves = [states, gate, *head.parameters()]
    gradients = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for gradient, expected_gradient in gradients:
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)
