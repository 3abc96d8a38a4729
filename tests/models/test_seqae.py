"""The sequence auto-encoder's own: it learns to write a text again, dropout of words, a target behind every word."""

import pytest
import torch
from torch.nn import functional as F
from zoo import Case, make_batch

from hf_ctxmodels import CtxError, CtxSeqaeConfig, CtxSeqaeForCausalLM, CtxSeqaeTokenizer
from hf_ctxmodels.models.seqae.modeling_seqae import label_gains
from hf_ctxmodels.objectives import SequenceAutoencoding
from hf_ctxmodels.registry import FAMILIES

BASE = Case(FAMILIES["seqae"], "AutoModel")
CLASSIFIER = Case(FAMILIES["seqae"], "AutoModelForSequenceClassification")
TEXTS = ["a cat sat.", "the dog ran, the cat ran", "dog", "sat a dog the cat"]


def test_a_text_is_written_again() -> None:
    """By `generate`, from the state behind a text and its end, after some steps on a few texts."""
    tokenizer = CtxSeqaeTokenizer.train(TEXTS, 30, min_count=1)
    objective = SequenceAutoencoding(tokenizer, max_length=21, seed=0)
    torch.manual_seed(0)
    model = CtxSeqaeForCausalLM(CtxSeqaeConfig(vocab_size=len(tokenizer), embedding_size=24, hidden_size=48))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = objective.collate(list(objective.examples([[text] for text in TEXTS])))
    for _ in range(120):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for text in TEXTS:
        read = tokenizer(text, return_tensors="pt")
        written = model.eval().generate(**read, max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(written[0, read["input_ids"].shape[1] :], skip_special_tokens=True) == text


@pytest.mark.parametrize("side", ["right", "left"])
def test_pooled_is_the_state_behind_the_last_word(side: str) -> None:
    model, batch = BASE.model(), make_batch(BASE, (9, 1, 4), side=side)
    outputs = model(**batch, use_cache=True)
    assert torch.equal(outputs.pooler_output, outputs.past_key_values.states[-1][0][:, 0])


@pytest.mark.parametrize("kind", ["word_dropout_prob", "embedding_dropout_prob", "hidden_dropout_prob"])
def test_every_dropout_does_something(kind: str) -> None:
    batch = make_batch(BASE, (9, 5, 4))
    model = BASE.model(**{kind: 0.5}).train()
    draws = [model(**batch).last_hidden_state for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    quiet = BASE.model(**{kind: 0.5})
    assert torch.equal(quiet(**batch).last_hidden_state, quiet(**batch).last_hidden_state)


def test_a_dropped_word_has_no_vector() -> None:
    """Whole words, each place by itself, at the rate asked for; the others grow so that the mean stays."""
    model = BASE.model(word_dropout_prob=0.25).train()
    ids = torch.full((1, 4000), 7)
    vectors = model.embed(ids)
    kept = vectors.any(-1)
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(vectors[kept], model.word_embeddings(ids)[kept] / 0.75)


class TestLinearGain:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_loss_is_the_weighted_mean_over_words(self, side: str) -> None:
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER, (9, 1, 4, 2), side=side)
        labels = torch.tensor([2, 0, -100, 1])
        outputs = model(**batch, labels=labels)
        states = model.seqae(**batch).last_hidden_state
        total = torch.zeros(())
        for row, there in enumerate(batch["attention_mask"].bool()):
            logits, length = model.classifier(states[row][there]), int(there.sum())
            torch.testing.assert_close(outputs.logits[row], logits[-1])
            if labels[row] < 0:
                continue
            gains = [step / max(1, length - 1) for step in range(length)] if length > 1 else [1.0]
            for gain, step in zip(gains, logits, strict=True):
                total += gain / sum(gains) * F.cross_entropy(step[None], labels[row : row + 1])
        torch.testing.assert_close(outputs.loss, total / 3)

    def test_counts_of_a_larger_batch(self) -> None:
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER, (9, 1, 4, 2))
        labels = torch.tensor([2, 0, -100, 1])
        whole = model(**batch, labels=labels).loss
        parts = [slice(1), slice(1, 4)]
        halves = [
            model(**{name: value[part] for name, value in batch.items()}, labels=labels[part], num_items_in_batch=3)
            for part in parts
        ]
        torch.testing.assert_close(sum(each.loss for each in halves), whole)

    def test_evaluation_is_that_of_the_last_word(self) -> None:
        batch, labels = make_batch(CLASSIFIER), torch.tensor([2, 0, 1, 1])
        losses = [CLASSIFIER.model(label_gain=gain)(**batch, labels=labels).loss for gain in ("last", "linear")]
        assert torch.equal(*losses)

    def test_gains_rise_to_the_last_and_add_up(self) -> None:
        gains = label_gains(torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1]]).bool())
        torch.testing.assert_close(gains, torch.tensor([[0, 1 / 3, 2 / 3, 0], [0, 0, 0, 1.0]]))

    def test_refused(self) -> None:
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER)
        with pytest.raises(CtxError, match="label_gain"):
            model(**batch, labels=torch.rand(4, 3))
        with pytest.raises(CtxError, match="outside"):
            model(**batch, labels=torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"label_gain": "linear", "classifier_pooling": "mean"},
        {"word_dropout_prob": 1.0},
        {"tie_word_embeddings": True},
        {"bptt": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_configurations_that_are_none(wrong: dict) -> None:
    with pytest.raises(Exception, match=next(iter(wrong))):
        CtxSeqaeConfig(**wrong)
