"""Multiple choice with language modeling against transformers' double-heads classes of GPT and GPT-2."""

from typing import Any

import pytest
import torch
import transformers
from test_random_configurations import assert_equal_gradients
from transformers import PreTrainedModel
from zoo import CHOICES, Case, assert_close, assert_same_weights, load_strict, make_batch

from hf_ctxmodels.registry import FAMILIES

CASES = [Case(FAMILIES[name], "AutoModelForMultipleChoice") for name in ("gpt", "gpt2")]


def pair(case: Case, folder: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A randomly initialized transformers model, and the model loaded from its checkpoint."""
    torch.manual_seed(0)
    reference = getattr(transformers, case.model_class.reference_architecture)(case.reference_config()).eval()
    reference.save_pretrained(folder)
    return reference, load_strict(case.model_class, folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_loss(case: Case, tmp_path: Any) -> None:
    """Logits with padding on either side; the loss for inputs of equal length, where transformers' mean is the same."""
    reference, model = pair(case, tmp_path)
    batch, left_padded = make_batch(case), make_batch(case, side="left")
    # transformers' logits for the last token of each choice
    outputs = reference.transformer(**{name: tensor.flatten(0, 1) for name, tensor in batch.items()})
    states = outputs.last_hidden_state.unflatten(0, (-1, CHOICES))
    expected = reference.multiple_choice_head(states, batch["attention_mask"].sum(-1) - 1).squeeze(-1)
    assert_close(model(**batch).logits, expected)
    assert_close(model(**left_padded).logits, expected)

    ids = torch.randint(5, 61, (4, CHOICES, 9), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2, 1, 1])
    outputs = reference(ids, labels=ids, mc_labels=labels)
    expected_loss = outputs.mc_loss + 0.5 * outputs.loss
    loss = model.train()(ids, labels=labels).loss
    assert_close(loss, expected_loss, "loss")
    loss.backward()
    expected_loss.backward()
    assert_equal_gradients(model, reference, tmp_path / "gradients")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_export_is_bit_exact(case: Case, tied: bool, tmp_path: Any) -> None:
    model = case.model(tie_word_embeddings=tied)
    model.export_reference(tmp_path)
    reference = load_strict(getattr(transformers, case.model_class.reference_architecture), tmp_path)
    reference.save_pretrained(tmp_path / "reference")
    assert_same_weights(case.model_class.from_pretrained(tmp_path / "reference"), model)
    assert reference.transformer.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
