"""The beam-search span heads of XLNet and XLM against transformers."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, XLMForQuestionAnswering, XLNetForQuestionAnswering
from zoo import Batch, Case, LowRank, assert_close, assert_same_weights, load_strict, make_batch, with_random_parameters

from hf_ctxmodels import CtxError, CtxXLMForBeamSearchQuestionAnswering, CtxXLNetForQuestionAnswering
from hf_ctxmodels.registry import FAMILIES

CLASSES = {
    "xlnet": (XLNetForQuestionAnswering, CtxXLNetForQuestionAnswering),
    "xlm": (XLMForQuestionAnswering, CtxXLMForBeamSearchQuestionAnswering),
}


@pytest.fixture(params=CLASSES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(FAMILIES[request.param], "AutoModelForQuestionAnswering")


@pytest.fixture
def pair(case: Case, tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(0)
    reference_class, model_class = CLASSES[case.family.name]
    config = case.reference_config(start_n_top=3, end_n_top=2)
    reference = with_random_parameters(reference_class(config), 0).eval()
    reference.save_pretrained(tmp_path)
    return reference, load_strict(model_class, tmp_path)


def batch_and_mask(case: Case) -> tuple[Batch, torch.Tensor]:
    """Examples padded on the left, and a p_mask for the padding and the first three tokens."""
    batch = make_batch(case, (12, 7, 9), side="left")
    excluded = torch.arange(12)[None] < 12 - batch["attention_mask"].sum(1, keepdim=True) + 3
    return batch, excluded.float()


def test_export_is_bit_exact(pair: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    reference, model = pair
    model.export_reference(tmp_path / "export")
    assert_same_weights(load_strict(type(reference), tmp_path / "export"), reference)


@pytest.mark.parametrize("cls_index", [None, torch.tensor([11, 10, 9])])
def test_beam_search_outputs(
    case: Case, pair: tuple[PreTrainedModel, PreTrainedModel], cls_index: torch.Tensor | None
) -> None:
    reference, model = pair
    batch, excluded = batch_and_mask(case)
    with torch.no_grad():
        expected = reference(**batch, p_mask=excluded, cls_index=cls_index)
        outputs = model(**batch, p_mask=excluded, cls_index=cls_index)
    for name in ("start_top_log_probs", "end_top_log_probs", "cls_logits"):
        assert_close(outputs[name], expected[name], name)
    for name in ("start_top_index", "end_top_index"):
        assert torch.equal(outputs[name], expected[name]), name


@pytest.mark.parametrize("answerable", [True, False])
def test_losses_and_gradients(case: Case, pair: tuple[PreTrainedModel, PreTrainedModel], answerable: bool) -> None:
    reference, model = pair
    batch, excluded = batch_and_mask(case)
    targets = {"start_positions": torch.tensor([4, 9, 8]), "end_positions": torch.tensor([6, 9, 11])}
    if answerable:
        targets |= {"is_impossible": torch.tensor([0.0, 1.0, 0.0]), "cls_index": torch.tensor([11, 11, 11])}
    expected = reference(**batch, p_mask=excluded, **targets).loss
    loss = model(**batch, p_mask=excluded, **targets).loss
    assert_close(loss, expected, "loss")
    expected.backward()
    loss.backward()
    for head in ("start_logits", "end_logits"):
        modules = (getattr(network, head) for network in (model, getattr(reference, "qa_outputs", reference)))
        assert_close(*([parameter.grad for parameter in module.parameters()] for module in modules), head)
    assert_close(*(network.get_input_embeddings().weight.grad for network in (model, reference)))


def test_padding_is_excluded(case: Case, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = pair
    unpadded = make_batch(case, (5,), side="left")
    padded = make_batch(case, (5,), width=9, side="left")
    with torch.no_grad():
        expected, outputs = model(**unpadded), model(**padded)
    for name in ("start_top_log_probs", "end_top_log_probs", "cls_logits"):
        assert_close(outputs[name], expected[name], name)
    assert torch.equal(outputs.start_top_index, expected.start_top_index + 4)


def test_short_input_has_fewer_candidates(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = pair
    outputs = model(input_ids=torch.tensor([[7, 8]]))
    assert outputs.start_top_index.shape == (1, 2)
    assert outputs.end_top_index.shape == (1, 4)


def test_accumulated_loss_equals_batch_loss(case: Case, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = pair
    batch, _ = batch_and_mask(case)
    batch |= {
        "start_positions": torch.tensor([4, 500, 8]),
        "end_positions": torch.tensor([6, 500, 11]),
        "is_impossible": torch.tensor([0.0, 1.0, 0.0]),
    }
    counts = {"start_positions": 2, "end_positions": 2, "is_impossible": 3}
    examples = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    losses = [model(**example, num_items_in_batch=counts).loss for example in examples]
    assert_close(torch.stack(losses).sum(), model(**batch).loss)


def test_invalid_inputs_raise(case: Case, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = pair
    batch, excluded = batch_and_mask(case)
    targets = {"start_positions": torch.tensor([4, 9, 8]), "end_positions": torch.tensor([6, 1, 11])}
    with pytest.raises(CtxError, match=r"end_positions\[1\] is 1"):
        model(**batch, **targets)
    with pytest.raises(CtxError, match="p_mask"):
        model(**batch, p_mask=excluded[:, 1:])
    with pytest.raises(CtxError, match="p_mask is a list"):
        model(**batch, p_mask=excluded.tolist())
    valid = {name: torch.tensor([11, 11, 11]) for name in ("start_positions", "end_positions")}
    invalid_values = {
        "is_impossible": ([0, 1, 0], torch.tensor([0, 1]), torch.tensor([0, 2, 0]), torch.tensor([0.0, -100.0, 0.0])),
        "cls_index": ([11, 11, 11], torch.tensor([11.0, 11.0, 11.0]), torch.tensor([11, 12, 11]), torch.tensor(11)),
        "start_positions": ([11, 11, 11], torch.tensor([True, True, True]), torch.tensor([11])),
    }
    for name, values in invalid_values.items():
        for value in values:
            with pytest.raises(CtxError, match=name):
                model(**batch, **valid | {name: value})


def test_adapter_of_end_classifier_is_used(case: Case, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = pair
    batch, _ = batch_and_mask(case)
    base = model(**batch).end_top_log_probs
    adapter = model.end_logits.dense_0 = LowRank(model.end_logits.dense_0)
    adapted = model(**batch).end_top_log_probs
    adapted.sum().backward()
    assert adapter.down.weight.grad.any(0).all()
    model.end_logits.dense_0 = adapter.merged()
    assert_close(adapted, model(**batch).end_top_log_probs)
    assert (adapted - base).abs().max() > 1e-3
