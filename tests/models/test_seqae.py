"""Sequence autoencoder: reconstruction, dropout, and the classifier with linear gain."""

import pytest
import torch
from torch.nn import functional as F
from zoo import Case, make_batch

from hf_ctxmodels import CtxError, CtxSeqaeConfig, CtxSeqaeForCausalLM, CtxSeqaeTokenizer
from hf_ctxmodels.objectives import SequenceAutoencoding
from hf_ctxmodels.registry import FAMILIES

BASE = Case(FAMILIES["seqae"], "AutoModel")
CLASSIFIER = Case(FAMILIES["seqae"], "AutoModelForSequenceClassification")
TEXTS = ["a cat sat.", "the dog ran, the cat ran", "dog", "sat a dog the cat"]


def test_generate_reconstructs_texts() -> None:
    """After a few training steps on the same texts."""
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
        inputs = tokenizer(text, return_tensors="pt")
        generated = model.eval().generate(**inputs, max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == text


@pytest.mark.parametrize("side", ["right", "left"])
def test_pooler_output_is_final_state(side: str) -> None:
    model, batch = BASE.model(), make_batch(BASE, (9, 1, 4), side=side)
    outputs = model(**batch, use_cache=True)
    assert torch.equal(outputs.pooler_output, outputs.past_key_values.states[-1][0][:, 0])


def test_dropout_is_active_only_in_training() -> None:
    batch = make_batch(BASE, (9, 5, 4))
    for field in ("word_dropout_prob", "embedding_dropout_prob", "hidden_dropout_prob"):
        model = BASE.model(**{field: 0.5})
        first, second = (model(**batch).last_hidden_state for _ in range(2))
        assert torch.equal(first, second), field
        first, second = (model.train()(**batch).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second), field


def test_word_dropout_drops_whole_words() -> None:
    """Words are dropped independently at each position; the remaining embeddings are rescaled."""
    model = BASE.model(word_dropout_prob=0.25).train()
    ids = torch.full((1, 4000), 7)
    vectors = model.embed(ids)
    is_kept = vectors.any(-1)
    assert is_kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(vectors[is_kept], model.word_embeddings(ids)[is_kept] / 0.75)


class TestLinearGain:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_loss_is_weighted_mean_over_words(self, side: str) -> None:
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER, (9, 1, 4, 2), side=side)
        labels = torch.tensor([2, 0, -100, 1])
        outputs = model(**batch, labels=labels)
        states = model.seqae(**batch).last_hidden_state
        total = torch.zeros(())
        for row, token_mask in enumerate(batch["attention_mask"].bool()):
            logits, length = model.classifier(states[row][token_mask]), int(token_mask.sum())
            torch.testing.assert_close(outputs.logits[row], logits[-1])
            if labels[row] < 0:
                continue
            gains = [step / max(1, length - 1) for step in range(length)] if length > 1 else [1.0]
            for gain, step_logits in zip(gains, logits, strict=True):
                total += gain / sum(gains) * F.cross_entropy(step_logits[None], labels[row : row + 1])
        torch.testing.assert_close(outputs.loss, total / 3)
        microbatches = [{name: value[rows] for name, value in batch.items()} for rows in (slice(1), slice(1, 4))]
        losses = [
            model(**microbatch, labels=row_labels, num_items_in_batch=3).loss
            for microbatch, row_labels in zip(microbatches, labels.split([1, 3]), strict=True)
        ]
        torch.testing.assert_close(sum(losses), outputs.loss)

    def test_evaluation_uses_last_word(self) -> None:
        batch, labels = make_batch(CLASSIFIER), torch.tensor([2, 0, 1, 1])
        losses = [CLASSIFIER.model(label_gain=gain)(**batch, labels=labels).loss for gain in ("last", "linear")]
        assert torch.equal(*losses)

    def test_regularization(self) -> None:
        """The penalty of a base model is part of the training loss, as with other gains."""
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER)
        labels = torch.tensor([2, 0, 1, 1])
        expected = model(**batch, labels=labels).loss + 3.0
        model.base_model.regularizers = [lambda: torch.tensor(3.0)]
        torch.testing.assert_close(model(**batch, labels=labels).loss, expected)

    def test_invalid_labels(self) -> None:
        model, batch = CLASSIFIER.model(label_gain="linear").train(), make_batch(CLASSIFIER)
        with pytest.raises(CtxError, match="label_gain"):
            model(**batch, labels=torch.rand(4, 3))
        with pytest.raises(CtxError, match="outside"):
            model(**batch, labels=torch.tensor([0, 1, 2, 3]))
        model.config.problem_type = "regression"
        with pytest.raises(CtxError, match="problem_type='regression'"):
            model(**batch, labels=torch.tensor([0, 1, 2, 1]))
