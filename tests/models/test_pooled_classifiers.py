"""Classifiers that read the mean of a sequence's tokens in place of the paper's choice (`classifier_pooling`)."""

import pytest
import torch
from zoo import CASES, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets, objective

from hf_ctxmodels.core.errors import CtxError

POOLED = [
    case
    for case in CASES
    if case.has_field("classifier_pooling") and getattr(case.model_class, "has_configurable_pooling", False)
]


# The two ways to a pooled state: BERT's pooler and XLNet's summary, each over one text and over choices.
BOTH_WAYS = [case for case in POOLED if case.family.name in ("bert", "xlnet")]


@pytest.fixture(params=BOTH_WAYS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_every_family_of_transformers_is_here() -> None:
    assert {case.family.name for case in POOLED} >= {"bert", "albert", "electra", "xlnet"}


@pytest.mark.parametrize("case", POOLED, ids=str)
def test_the_classifier_reads_the_mean_of_the_tokens(case) -> None:
    model, batch = case.model(classifier_pooling="mean").eval(), make_batch(case)
    read = []
    first = model.sequence_summary["summary"] if hasattr(model, "sequence_summary") else model.dropout
    first.register_forward_hook(lambda module, given, out: read.append(given[0]))
    model(**batch)
    flat = {name: tensor.flatten(0, 1) if case.has_choices else tensor for name, tensor in batch.items()}
    states = model.base_model(**flat).last_hidden_state
    means = [row[mask != 0].mean(0) for row, mask in zip(states, flat["attention_mask"])]
    assert_close(read[0], torch.stack(means), "what the classifier reads")


def test_padding_and_layout_change_nothing(case) -> None:
    batch = make_batch(case)
    targets = make_targets(case, batch)
    packed, padded = (case.model(classifier_pooling="mean", unpad=unpad).eval() for unpad in (True, False))
    assert_close(packed(**batch).logits, padded(**batch).logits, "logits")
    found = [gradients(model, objective(case, model, {**batch, **targets})) for model in (packed, padded)]
    assert_same_gradients(*found)


def test_it_is_saved_and_has_no_layer_of_the_pooler(case, tmp_path) -> None:
    model, batch = case.model(classifier_pooling="mean").eval(), make_batch(case)
    model.save_pretrained(tmp_path)
    again = case.auto_class.from_pretrained(tmp_path).eval()
    assert again.config.classifier_pooling == "mean"
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert not [name for name in model.state_dict() if "pooler" in name or name.startswith("summary")]


def test_the_reference_cannot_have_it(case, tmp_path) -> None:
    if not case.has_reference:
        pytest.skip(f"transformers has no {case}")
    with pytest.raises(CtxError, match="classifier_pooling=None"):
        case.model(classifier_pooling="mean").export_reference(tmp_path)
    case.model().export_reference(tmp_path)


def test_a_ready_mask_is_refused(case) -> None:
    model, batch = case.model(classifier_pooling="mean"), make_batch(case)
    if case.has_choices:
        pytest.skip("choices take masks of one shape alone")
    mask = batch.pop("attention_mask")[:, None, None].bool().expand(-1, -1, mask_length(batch), -1)
    with pytest.raises(CtxError, match="attention_mask"):
        model(**batch, attention_mask=mask)


def mask_length(batch: dict[str, torch.Tensor]) -> int:
    return next(iter(batch.values())).shape[1]
