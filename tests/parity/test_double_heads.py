"""The double heads of GPT and GPT-2 in transformers, which no Auto class opens: choices and language modelling."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from zoo import CHOICES, Batch, Case, assert_close, make_batch

from hf_ctxmodels.registry import FAMILIES

CASES = [Case(FAMILIES[name], "AutoModelForMultipleChoice") for name in ("gpt", "gpt2")]


def pair(case: Case, folder: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random reference model, and ours opened from its checkpoint."""
    torch.manual_seed(0)
    reference = getattr(transformers, case.model_class.reference_architecture)(case.reference_config()).eval()
    reference.save_pretrained(folder)
    ours, report = case.model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return reference, ours.eval()


def expected_outputs(reference: PreTrainedModel, batch: Batch) -> Any:
    """The reference reads the token that it is told to."""
    inputs = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    outputs = reference.transformer(**inputs)
    states = outputs.last_hidden_state.unflatten(0, (-1, CHOICES))
    return reference.multiple_choice_head(states, batch["attention_mask"].sum(-1) - 1).squeeze(-1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_loss(case: Case, tmp_path: Any) -> None:
    """Of rows with padding on either side; with rows of one length the sum of both losses is the reference's."""
    reference, ours = pair(case, tmp_path)
    batch, left = make_batch(case), make_batch(case, side="left")
    expected = expected_outputs(reference, batch)
    assert_close(ours(**batch).logits, expected)
    assert_close(ours(**left).logits, expected)

    ids = torch.randint(5, 61, (4, CHOICES, 9), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2, 1, 1])
    both = reference(ids, labels=ids, mc_labels=labels)
    got = ours.train()(ids, labels=labels).loss
    assert_close(got, both.mc_loss + 0.5 * both.loss, "loss")
    _compare_gradients(case, ours, reference, got, both.mc_loss + 0.5 * both.loss, tmp_path)


def _compare_gradients(
    case: Case, ours: PreTrainedModel, reference: PreTrainedModel, loss: Tensor, expected: Tensor, folder: Any
) -> None:
    """As gradients of the reference's parameters, by exporting ours."""
    loss.backward()
    expected.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    ours.export_reference(folder / "gradients")
    exported = type(reference).from_pretrained(folder / "gradients")
    for (name, gradient), parameter in zip(exported.named_parameters(), reference.parameters(), strict=True):
        assert_close(gradient, parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_export_is_bit_exact(case: Case, tied: bool, tmp_path: Any) -> None:
    model = case.model(tie_word_embeddings=tied)
    model.export_reference(tmp_path)
    reference = getattr(transformers, case.model_class.reference_architecture)
    found, report = reference.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    found.save_pretrained(tmp_path / "again")
    again = case.model_class.from_pretrained(tmp_path / "again").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
    assert found.transformer.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
