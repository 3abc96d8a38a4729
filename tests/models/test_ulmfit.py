"""ULMFiT: penalties, dropout, the classifier and the backward model."""

import pytest
import torch
from zoo import Case, gradients, labeled_batch, make_batch, make_targets

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

LM = Case(FAMILIES["ulmfit"], "AutoModelForCausalLM")
CLASSIFIER = Case(FAMILIES["ulmfit"], "AutoModelForSequenceClassification")
IDS = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("side", ["right", "left"])
def test_activation_and_slowness_penalties(side: str) -> None:
    """In training mode, penalties are means over words with a target, also with microbatches."""
    batch = make_batch(LM, (9, 1, 4), side=side)
    targets = make_targets(LM, batch)
    model = LM.model(activation_penalty=0.7, slowness_penalty=0.3).train()
    outputs = model(**batch, **targets)
    states = model.base_model(**batch).last_hidden_state
    target_mask = targets["labels"][:, 1:] != -100
    activation_sum = slowness_sum = 0.0
    for row, column in target_mask.nonzero().tolist():
        activation_sum += states[row, column].square().mean().item()
        if column and batch["attention_mask"][row, column - 1]:
            slowness_sum += (states[row, column] - states[row, column - 1]).square().mean().item()
    expected = (0.7 * activation_sum + 0.3 * slowness_sum) / int(target_mask.sum())
    counts = {name: (value != -100).sum() for name, value in targets.items()}
    microbatches = [
        {name: value[rows] for name, value in (batch | targets).items()} for rows in (slice(1), slice(1, 3))
    ]
    losses = [model(**microbatch, num_items_in_batch=counts).loss for microbatch in microbatches]
    torch.testing.assert_close(sum(losses), outputs.loss)
    eval_loss = model.eval()(**batch, **targets).loss
    assert (outputs.loss - eval_loss).item() == pytest.approx(expected, rel=1e-4)


def test_dropout_types() -> None:
    batch = make_batch(LM, (9, 5, 4))
    targets = make_targets(LM, batch)
    no_dropout = {f"{name}_dropout_prob": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
    for field in no_dropout:
        model = LM.model(**{**no_dropout, field: 0.5}, dropout_scale=1.0).train()
        losses = {float(model(**batch, **targets).loss) for _ in range(4)}
        assert len(losses) > 1, field
    model = LM.model(**no_dropout, dropout_scale=1.0).train()
    assert len({float(model(**batch, **targets).loss) for _ in range(3)}) == 1


class TestClassifier:
    def test_concat_pooling(self) -> None:
        """Last state, maximum and mean over all tokens of a text."""
        model, batch = CLASSIFIER.model(bptt=3), make_batch(CLASSIFIER, (11, 2), side="right")
        with torch.no_grad():
            outputs = model.encode(**batch)
        for row, token_mask in enumerate(batch["attention_mask"].bool()):
            states = outputs.last_hidden_state[row][token_mask]
            expected = torch.cat([states[-1], states.amax(0), states.mean(0)])
            torch.testing.assert_close(outputs.pooler_output[row], expected)

    def test_bptt_truncates_gradients_only(self) -> None:
        batch = labeled_batch(CLASSIFIER, (11, 2))
        models = [CLASSIFIER.model(bptt=steps) for steps in (3, 11, 100)]
        losses = [model(**batch).loss for model in models]
        assert losses[0] == losses[1] == losses[2]
        name = "ulmfit.word_embeddings.weight"
        embedding_gradients = [gradients(model, loss)[name] for model, loss in zip(models, losses, strict=True)]
        assert torch.equal(embedding_gradients[1], embedding_gradients[2])
        assert not torch.allclose(embedding_gradients[0], embedding_gradients[1])
        assert (embedding_gradients[0].abs().sum(1) > 0).equal(embedding_gradients[1].abs().sum(1) > 0), (
            "all words must have a gradient"
        )

    def test_classifier_normalization(self) -> None:
        model = CLASSIFIER.model().train()
        batch = make_batch(CLASSIFIER)
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        assert isinstance(model.classifier[0], torch.nn.BatchNorm1d)
        assert model.classifier[0].running_mean.any()
        assert model(**make_batch(CLASSIFIER, (4,)), labels=torch.tensor([0])).loss.isfinite(), "a batch of one example"
        assert isinstance(CLASSIFIER.model(classifier_norm="layer").classifier[0], torch.nn.LayerNorm)


def reverse(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in batch.items()}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
class TestBackward:
    """The backward model equals a forward model with the same weights on reversed texts."""

    def test_language_model(self, side: str, unpad: bool) -> None:
        batch = make_batch(LM, (9, 1, 4), side=side)
        forward, backward = (LM.model(unpad=unpad, backward=value) for value in (False, True))
        expected = forward(**reverse(batch), use_cache=True)
        outputs = backward(**batch, use_cache=True)
        torch.testing.assert_close(outputs.logits, expected.logits.flip(1))
        torch.testing.assert_close(outputs.past_key_values.states, expected.past_key_values.states)
        continued = forward(**reverse(batch), past_key_values=expected.past_key_values)
        torch.testing.assert_close(
            backward(**batch, past_key_values=outputs.past_key_values).logits, continued.logits.flip(1)
        )

    def test_losses(self, side: str, unpad: bool) -> None:
        """Labels equal to the input ids, with an additional target before the sequence, and packed sequences."""
        batch = make_batch(LM, (9, 1, 4), side=side)
        forward, backward = (LM.model(unpad=unpad, backward=value) for value in (False, True))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        sequences = batch["attention_mask"] * torch.tensor([1, 1, 1, 2, 2, 2, 2, 3, 3])
        packed = {"input_ids": batch["input_ids"], "sequence_ids": sequences}
        for inputs in (batch, packed):
            inputs = {**inputs, "labels": labels}
            torch.testing.assert_close(backward(**inputs).loss, forward(**reverse(inputs)).loss)
        targets = torch.full_like(labels, -100)
        for row, token_mask in enumerate(batch["attention_mask"].bool()):
            targets[row, token_mask] = torch.cat([torch.tensor([7]), labels[row, token_mask][:-1]])
        inputs = {**batch, "labels": torch.nn.functional.pad(targets, (0, 1), value=-100)}
        torch.testing.assert_close(backward(**inputs).loss, forward(**reverse(inputs)).loss)

    def test_classifier(self, side: str, unpad: bool) -> None:
        batch = make_batch(CLASSIFIER, (9, 1, 4), side=side)
        forward, backward = (CLASSIFIER.model(unpad=unpad, backward=value) for value in (False, True))
        torch.testing.assert_close(backward(**batch).logits, forward(**reverse(batch)).logits)


def test_backward_model_generation_raises() -> None:
    with pytest.raises(CtxError, match="backward language model"):
        LM.model(backward=True).generate(IDS, max_new_tokens=2)
