"""What is ERNIE's own: embeddings of the task, heads by the configuration's tasks, and 1.0's checkpoints."""

import inspect

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from zoo import Case, assert_close, assert_same_outputs, make_batch, make_targets

from hf_ctxmodels import CtxErnieConfig, CtxErnieForMaskedLMWithPair, CtxErnieForPreTraining, CtxError
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TOKEN_TASKS
from hf_ctxmodels.objectives.multitask.continual_tasks import TASKS
from hf_ctxmodels.registry import FAMILIES

ERNIE = FAMILIES["ernie"]
ENCODER = Case(ERNIE, "AutoModel")
PRETRAINING = Case(ERNIE, "AutoModelForPreTraining")


def with_tasks(batch, seed=0):
    """The batch with a random task for each token."""
    generator = torch.Generator().manual_seed(seed)
    return batch | {"task_type_ids": torch.randint(3, batch["input_ids"].shape, generator=generator)}


def test_task_embeddings_are_those_of_the_reference(tmp_path):
    """On every path and padding side, and with embeddings in place of ids."""
    reference = ENCODER.reference_model(seed=3)
    reference.save_pretrained(tmp_path)
    for side in ("right", "left"):
        batch = with_tasks(make_batch(ENCODER, side=side))
        tokens = batch["attention_mask"] == 1
        expected = reference(**batch).last_hidden_state[tokens]
        assert (expected - reference(**{**batch, "task_type_ids": None}).last_hidden_state[tokens]).abs().max() > 0.1
        for attention, unpad in (("sdpa", True), ("sdpa", False), ("eager", False)):
            model = ENCODER.model_class.from_pretrained(tmp_path, attn_implementation=attention, unpad=unpad)
            assert_close(model(**batch).last_hidden_state[tokens], expected, f"{attention}, unpad={unpad}, {side}")
            embeds = model.get_input_embeddings()(batch["input_ids"])
            other = {name: value for name, value in batch.items() if name != "input_ids"}
            assert_close(model(inputs_embeds=embeds, **other).last_hidden_state[tokens], expected, "of embeddings")


def test_every_head_passes_the_task_on():
    """And names it, or Trainer would drop the column."""
    for name in ERNIE.models:
        case = Case(ERNIE, name)
        assert "task_type_ids" in inspect.signature(case.model_class.forward).parameters or case.is_base, name
        model, batch = case.model(), with_tasks(make_batch(case))
        without = {**batch, "task_type_ids": torch.zeros_like(batch["task_type_ids"])}
        first, second = (model(**each)[0] for each in (batch, without))
        assert (first - second).abs().max() > 1e-3, name


def test_task_ids_that_are_refused():
    batch = make_batch(ENCODER)
    with pytest.raises(CtxError, match="no task embeddings"):
        ENCODER.model(use_task_id=False)(**with_tasks(batch))
    assert not [name for name in ENCODER.model(use_task_id=False).state_dict() if "task" in name]
    for ids, message in (
        (torch.full_like(batch["input_ids"], 3), r"task_type_ids\[0, 0\] is 3, outside \[0, task_type_vocab_size=3\)"),
        (torch.zeros(1, 2, dtype=torch.long), r"task_type_ids is \(1, 2\)"),
    ):
        with pytest.raises(CtxError, match=message):
            ENCODER.model()(**batch, task_type_ids=ids)


def test_the_loss_is_a_plain_sum_over_tasks_and_rows():
    """Every row has targets of some tasks; by loops over targets from the logits of all positions."""
    model, batch = PRETRAINING.model(), with_tasks(make_batch(PRETRAINING, side="left"))
    targets = make_targets(PRETRAINING, batch, seed=4)
    for number, task in enumerate(SEQUENCE_TASKS):
        targets[f"{task}_labels"][[number % 4, (number + 1) % 4]] = -100
    logits, total = model(**batch), 0.0
    for task in ("mlm", *SEQUENCE_TASKS, *TOKEN_TASKS):
        name, field = ("labels", "prediction_logits") if task == "mlm" else (f"{task}_labels", f"{task}_logits")
        scores, aims = logits[field].flatten(0, -2), targets[name].flatten().tolist()
        terms = [-scores[place].log_softmax(-1)[aim] for place, aim in enumerate(aims) if aim != -100]
        total = total + sum(terms) / len(terms)
    got = model(**batch, **targets)
    assert_close(got.loss, total)
    assert got.prediction_logits is None
    assert got.capitalization_logits is None
    assert got.next_sentence_logits is not None


def test_only_tasks_with_targets_have_a_term():
    """As in a step of one task; the others' classifiers have zero gradients, not none."""
    model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
    targets = {name: torch.full_like(each, -100) for name, each in make_targets(PRETRAINING, batch).items()}
    targets["sentence_distance_labels"] = torch.tensor([0, 1, 2, 1])
    output = model(**batch, **targets)
    assert [name for name, value in output.items() if name.endswith("_loss")] == ["sentence_distance_loss"]
    assert_close(output.loss.detach(), output.sentence_distance_loss)
    output.loss.backward()
    classifiers = {name: module for name, module in model.named_children() if name.endswith("_head")}
    del classifiers["mlm_head"]
    assert len(classifiers) == len(SEQUENCE_TASKS) + len(TOKEN_TASKS)
    trained = [name for name, module in classifiers.items() if module.weight.grad.any()]
    assert trained == ["sentence_distance_head"]


def test_tasks_follow_the_configuration():
    assert set(TASKS) - {"knowledge_masking"} | {"next_sentence"} == {*SEQUENCE_TASKS, *TOKEN_TASKS}
    batch = make_batch(PRETRAINING)
    model = PRETRAINING.model(pretraining_tasks={"sentence_reordering": 9})
    assert model(**batch).sentence_reordering_logits.shape == (4, 9)
    assert model(**batch).next_sentence_logits is None
    labels = torch.tensor([0, 1, 0, -100])
    with pytest.raises(CtxError, match="next_sentence_labels are given, but the model has no task"):
        model(**batch, next_sentence_labels=labels)
    assert model(**batch, next_sentence_labels=torch.full_like(labels, -100), labels=None).loss is None
    for tasks, message in (({"spelling": 2}, "'spelling', which is no task"), ({"query_title": 1}, "1 classes for")):
        with pytest.raises(StrictDataclassClassValidationError, match=message):
            CtxErnieConfig(pretraining_tasks=tasks)


def test_first_version_goes_to_the_reference_and_back(tmp_path):
    """A model pretrained here opens as the reference's class, and a reference checkpoint goes on training here."""
    model = PRETRAINING.model(pretraining_tasks=None, use_task_id=False)
    model.save_pretrained(tmp_path / "ours")
    plain, report = CtxErnieForMaskedLMWithPair.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    plain.export_reference(tmp_path / "reference")
    reference, report = transformers.ErnieForPreTraining.from_pretrained(
        tmp_path / "reference", output_loading_info=True
    )
    assert not any(report.values()), report
    batch = make_batch(PRETRAINING)
    found, expected = model(**batch), reference.eval()(**batch)
    tokens = batch["attention_mask"] == 1
    assert_close(found.prediction_logits[tokens], expected.prediction_logits[tokens])
    assert_close(found.next_sentence_logits, expected.seq_relationship_logits)
    again, report = CtxErnieForPreTraining.from_pretrained(tmp_path / "reference", output_loading_info=True)
    assert not any(report.values()), report
    assert_same_outputs(again.eval()(**batch), found, batch["attention_mask"])
