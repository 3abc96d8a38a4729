"""Classifiers with mean pooling (`classifier_pooling`)."""

from pathlib import Path

import pytest
import torch
from zoo import CASES, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets, scalar_loss

from hf_ctxmodels.core.errors import CtxError

POOLED = [
    case
    for case in CASES
    if case.has_field("classifier_pooling") and getattr(case.model_class, "has_configurable_pooling", False)
]
# BERT's pooler and XLNet's summary, for texts and choices
CASES_BY_POOLER = [case for case in POOLED if case.family.name in ("bert", "xlnet")]


@pytest.mark.parametrize("case", POOLED, ids=str)
def test_classifier_input_is_mean_of_tokens(case: Case) -> None:
    model, batch = case.model(classifier_pooling="mean"), make_batch(case)
    inputs = []
    first_module = model.sequence_summary["summary"] if hasattr(model, "sequence_summary") else model.dropout
    if str(case) == "gpt-AutoModelForMultipleChoice":  # its choices share a dropout mask
        first_module = model.classifier
    first_module.register_forward_hook(lambda module, arguments, output: inputs.append(arguments[0]))
    model(**batch)
    flat = {name: tensor.flatten(0, 1) if case.has_choices else tensor for name, tensor in batch.items()}
    states = model.base_model(**flat).last_hidden_state
    means = [row[mask != 0].mean(0) for row, mask in zip(states, flat["attention_mask"])]
    assert_close(inputs[0], torch.stack(means))


@pytest.mark.parametrize("case", CASES_BY_POOLER, ids=str)
def test_layouts_saving_and_export(case: Case, tmp_path: Path) -> None:
    """The model has no pooler weights; exports and 4-D masks raise."""
    batch = make_batch(case)
    targets = make_targets(case, batch)
    model, padded = (case.model(classifier_pooling="mean", unpad=unpad) for unpad in (True, False))
    logits = model(**batch).logits
    assert_close(logits, padded(**batch).logits)
    expected = gradients(padded, scalar_loss(case, padded, batch | targets))
    assert_same_gradients(gradients(model, scalar_loss(case, model, batch | targets)), expected)
    model.save_pretrained(tmp_path)
    reloaded = case.auto_class.from_pretrained(tmp_path).eval()
    assert reloaded.config.classifier_pooling == "mean"
    assert torch.equal(reloaded(**batch).logits, logits)
    assert not [name for name in model.state_dict() if "pooler" in name or name.startswith("summary")]
    if case.has_reference:
        with pytest.raises(CtxError, match="classifier_pooling=None"):
            model.export_reference(tmp_path)
        case.model().export_reference(tmp_path)
    if not case.has_choices:
        mask = batch["attention_mask"]
        batch["attention_mask"] = mask[:, None, None].bool().expand(-1, -1, mask.shape[1], -1)
        with pytest.raises(CtxError, match="attention_mask"):
            model(**batch)
