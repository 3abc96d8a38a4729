"""ULMFiT's own: penalties, dropouts, and the classifier."""

import pytest
import torch
from zoo import Case, gradients, make_batch, make_targets

from hf_ctxmodels import CtxError, CtxUlmfitConfig, CtxUlmfitForCausalLM
from hf_ctxmodels.registry import FAMILIES

LM = Case(FAMILIES["ulmfit"], "AutoModelForCausalLM")
CLASSIFIER = Case(FAMILIES["ulmfit"], "AutoModelForSequenceClassification")
IDS = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("side", ["right", "left"])
def test_penalties(side: str) -> None:
    """In training alone; sums over the words with a target, divided by their number."""
    batch = make_batch(LM, (9, 1, 4), side=side)
    targets = make_targets(LM, batch)
    model = LM.model(activation_penalty=0.7, slowness_penalty=0.3).train()
    outputs = model(**batch, **targets)
    raw = model.base_model(**batch).last_hidden_state
    target_mask = targets["labels"][:, 1:] != -100
    size = change = 0.0
    for row, column in target_mask.nonzero().tolist():
        size += raw[row, column].square().mean().item()
        if column and batch["attention_mask"][row, column - 1]:
            change += (raw[row, column] - raw[row, column - 1]).square().mean().item()
    expected = (0.7 * size + 0.3 * change) / int(target_mask.sum())
    plain = model.eval()(**batch, **targets).loss
    assert (outputs.loss - plain).item() == pytest.approx(expected, rel=1e-4)


def test_penalties_under_accumulation() -> None:
    batch = make_batch(LM, (12, 3, 9, 1))
    targets = make_targets(LM, batch)
    model = LM.model().train()
    counts = {name: (value != -100).sum() for name, value in targets.items()}
    whole = model(**batch, **targets).loss
    parts = [
        model(**{name: value[rows] for name, value in (batch | targets).items()}, num_items_in_batch=counts).loss
        for rows in (slice(1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_every_dropout_does_something() -> None:
    batch = make_batch(LM, (9, 5, 4))
    targets = make_targets(LM, batch)
    nothing = {f"{kind}_dropout_prob": 0.0 for kind in ("embedding", "input", "hidden", "output", "weight")}
    for kind in nothing:
        model = LM.model(**{**nothing, kind: 0.5}, dropout_scale=1.0).train()
        losses = {float(model(**batch, **targets).loss) for _ in range(4)}
        assert len(losses) > 1, kind
    model = LM.model(**nothing, dropout_scale=1.0).train()
    assert len({float(model(**batch, **targets).loss) for _ in range(3)}) == 1


def test_rates_that_are_none() -> None:
    with pytest.raises(Exception, match="input_dropout_prob"):
        CtxUlmfitConfig(input_dropout_prob=0.6, dropout_scale=2.0)


class TestClassifier:
    def test_pools_the_whole_text(self) -> None:
        """The last state, the largest values and the mean, of tokens alone."""
        model, batch = CLASSIFIER.model(bptt=3), make_batch(CLASSIFIER, (11, 2), side="right")
        with torch.no_grad():
            outputs = model.encode(**batch)
        for row, there in enumerate(batch["attention_mask"].bool()):
            states = outputs.last_hidden_state[row][there]
            expected = torch.cat([states[-1], states.amax(0), states.mean(0)])
            torch.testing.assert_close(outputs.pooler_output[row], expected)

    def test_bptt_changes_gradients_and_nothing_else(self) -> None:
        batch = make_batch(CLASSIFIER, (11, 2))
        batch |= make_targets(CLASSIFIER, batch)
        models = [CLASSIFIER.model(bptt=steps) for steps in (3, 11, 100)]
        losses = [model(**batch).loss for model in models]
        assert losses[0] == losses[1] == losses[2]
        name = "ulmfit.word_embeddings.weight"
        found = [gradients(model, loss)[name] for model, loss in zip(models, losses, strict=True)]
        assert torch.equal(found[1], found[2])
        assert not torch.allclose(found[0], found[1])
        assert (found[0].abs().sum(1) > 0).equal(found[1].abs().sum(1) > 0), "every word is reached"

    def test_the_papers_normalisation(self) -> None:
        model = CLASSIFIER.model().train()
        batch = make_batch(CLASSIFIER)
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        assert isinstance(model.classifier[0], torch.nn.BatchNorm1d)
        assert model.classifier[0].running_mean.any()
        assert model(**make_batch(CLASSIFIER, (4,)), labels=torch.tensor([0])).loss.isfinite(), "one row will do"
        assert isinstance(CLASSIFIER.model(classifier_norm="layer").classifier[0], torch.nn.LayerNorm)


def test_tied() -> None:
    model = CtxUlmfitForCausalLM(LM.config())
    assert model.decoder.weight is model.get_input_embeddings().weight


def reversed_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in batch.items()}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
class TestBackward:
    """The model of the other direction on a text is the forward one, of the same weights, on the text turned round."""

    def test_language_model(self, side: str, unpad: bool) -> None:
        batch = make_batch(LM, (9, 1, 4), side=side)
        forward, backward = (LM.model(unpad=unpad, backward=value) for value in (False, True))
        expected = forward(**reversed_rows(batch), use_cache=True)
        found = backward(**batch, use_cache=True)
        torch.testing.assert_close(found.logits, expected.logits.flip(1))
        torch.testing.assert_close(found.past_key_values.states, expected.past_key_values.states)
        again = forward(**reversed_rows(batch), past_key_values=expected.past_key_values)
        torch.testing.assert_close(
            backward(**batch, past_key_values=found.past_key_values).logits, again.logits.flip(1)
        )

    def test_losses(self, side: str, unpad: bool) -> None:
        """Of labels as transformers has them, and with the word before the row; also of several sequences in a row."""
        batch = make_batch(LM, (9, 1, 4), side=side)
        forward, backward = (LM.model(unpad=unpad, backward=value) for value in (False, True))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        sequences = batch["attention_mask"] * torch.tensor([1, 1, 1, 2, 2, 2, 2, 3, 3])
        without = {"input_ids": batch["input_ids"], "sequence_ids": sequences}
        for given in ({**batch, "labels": labels}, {**without, "labels": labels}):
            torch.testing.assert_close(backward(**given).loss, forward(**reversed_rows(given)).loss)
        targets = torch.full_like(labels, -100)
        for row, there in enumerate(batch["attention_mask"].bool()):
            targets[row, there] = torch.cat([torch.tensor([7]), labels[row, there][:-1]])
        given = {**batch, "labels": torch.nn.functional.pad(targets, (0, 1), value=-100)}
        torch.testing.assert_close(backward(**given).loss, forward(**reversed_rows(given)).loss)

    def test_classifier(self, side: str, unpad: bool) -> None:
        batch = make_batch(CLASSIFIER, (9, 1, 4), side=side)
        forward, backward = (CLASSIFIER.model(unpad=unpad, backward=value) for value in (False, True))
        torch.testing.assert_close(backward(**batch).logits, forward(**reversed_rows(batch)).logits)


def test_backward_does_not_generate() -> None:
    with pytest.raises(CtxError, match="backward language model"):
        LM.model(backward=True).generate(IDS, max_new_tokens=2)
