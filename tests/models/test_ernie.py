"""ERNIE: task embeddings, heads of the configured tasks, and checkpoints of ERNIE 1.0."""

import inspect

import pytest
import torch
from transformers import ErnieForMaskedLM, ErnieForPreTraining
from zoo import Case, assert_close, assert_same_outputs, load_strict, make_batch, make_targets

from hf_ctxmodels import CtxErnieForMaskedLMWithPair, CtxErnieForPreTraining, CtxError
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TOKEN_TASKS
from hf_ctxmodels.objectives.continual_tasks import TASKS
from hf_ctxmodels.registry import FAMILIES

ERNIE = FAMILIES["ernie"]
ENCODER = Case(ERNIE, "AutoModel")
PRETRAINING = Case(ERNIE, "AutoModelForPreTraining")


def with_task_ids(batch, seed=0):
    """The batch with random task ids."""
    generator = torch.Generator().manual_seed(seed)
    return batch | {"task_type_ids": torch.randint(3, batch["input_ids"].shape, generator=generator)}


def test_task_embeddings_match_transformers(tmp_path):
    """On all attention paths, with padding on both sides, and with `inputs_embeds`."""
    reference = ENCODER.reference_model(seed=3)
    reference.save_pretrained(tmp_path)
    for side in ("right", "left"):
        batch = with_task_ids(make_batch(ENCODER, side=side))
        token_mask = batch["attention_mask"] == 1
        expected = reference(**batch).last_hidden_state[token_mask]
        assert (
            expected - reference(**{**batch, "task_type_ids": None}).last_hidden_state[token_mask]
        ).abs().max() > 0.1
        for attention, unpad in (("sdpa", True), ("sdpa", False), ("eager", False)):
            model = ENCODER.model_class.from_pretrained(tmp_path, attn_implementation=attention, unpad=unpad)
            assert_close(model(**batch).last_hidden_state[token_mask], expected, f"{attention}, unpad={unpad}, {side}")
            embeds = model.get_input_embeddings()(batch["input_ids"])
            inputs = {name: value for name, value in batch.items() if name != "input_ids"}
            assert_close(model(inputs_embeds=embeds, **inputs).last_hidden_state[token_mask], expected, "inputs_embeds")


def test_heads_accept_task_type_ids():
    """The argument is in the forward signatures; otherwise Trainer would drop the column."""
    for name in ERNIE.models:
        case = Case(ERNIE, name)
        assert "task_type_ids" in inspect.signature(case.model_class.forward).parameters or case.is_base, name
        model, batch = case.model(), with_task_ids(make_batch(case))
        first_task = {**batch, "task_type_ids": torch.zeros_like(batch["task_type_ids"])}
        assert (model(**batch)[0] - model(**first_task)[0]).abs().max() > 1e-3, name


def test_invalid_task_type_ids():
    batch = make_batch(ENCODER)
    with pytest.raises(CtxError, match="no task embeddings"):
        ENCODER.model(use_task_id=False)(**with_task_ids(batch))
    assert not [name for name in ENCODER.model(use_task_id=False).state_dict() if "task" in name]
    for ids, message in (
        (torch.full_like(batch["input_ids"], 3), r"task_type_ids\[0, 0\] is 3, outside \[0, task_type_vocab_size=3\)"),
        (torch.zeros(1, 2, dtype=torch.long), r"task_type_ids is \(1, 2\)"),
    ):
        with pytest.raises(CtxError, match=message):
            ENCODER.model()(**batch, task_type_ids=ids)


def test_loss_is_sum_over_tasks():
    """Compared with loops over targets; each example has targets for a subset of the tasks."""
    model, batch = PRETRAINING.model(), with_task_ids(make_batch(PRETRAINING, side="left"))
    targets = make_targets(PRETRAINING, batch, seed=4)
    for number, task in enumerate(SEQUENCE_TASKS):
        targets[f"{task}_labels"][[number % 4, (number + 1) % 4]] = -100
    logits, expected = model(**batch), 0.0
    for task in ("mlm", *SEQUENCE_TASKS, *TOKEN_TASKS):
        name, field = ("labels", "prediction_logits") if task == "mlm" else (f"{task}_labels", f"{task}_logits")
        task_logits, labels = logits[field].flatten(0, -2), targets[name].flatten().tolist()
        losses = [-task_logits[i].log_softmax(-1)[label] for i, label in enumerate(labels) if label != -100]
        expected = expected + sum(losses) / len(losses)
    outputs = model(**batch, **targets)
    assert_close(outputs.loss, expected)
    assert outputs.prediction_logits is None
    assert outputs.capitalization_logits is None
    assert outputs.next_sentence_logits is not None


def test_tasks_without_targets_have_no_loss():
    """As in a step on a single task; the other classifiers have zero gradients, as DDP expects."""
    model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
    targets = {name: torch.full_like(target, -100) for name, target in make_targets(PRETRAINING, batch).items()}
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


def test_heads_follow_configured_tasks():
    assert set(TASKS) - {"knowledge_masking"} | {"next_sentence"} == {*SEQUENCE_TASKS, *TOKEN_TASKS}
    batch = make_batch(PRETRAINING)
    model = PRETRAINING.model(pretraining_tasks={"sentence_reordering": 9})
    assert model(**batch).sentence_reordering_logits.shape == (4, 9)
    assert model(**batch).next_sentence_logits is None
    labels = torch.tensor([0, 1, 0, -100])
    with pytest.raises(CtxError, match="next_sentence_labels"):
        model(**batch, next_sentence_labels=labels)
    assert model(**batch, next_sentence_labels=torch.full_like(labels, -100), labels=None).loss is None


def test_export_and_loading_of_ernie_1_0_checkpoints(tmp_path):
    """transformers loads a pretrained model, and pretraining continues from a checkpoint of transformers."""
    model = PRETRAINING.model(pretraining_tasks=None, use_task_id=False)
    model.save_pretrained(tmp_path / "native")
    load_strict(CtxErnieForMaskedLMWithPair, tmp_path / "native").export_reference(tmp_path / "reference")
    batch = make_batch(PRETRAINING)
    outputs, expected = model(**batch), load_strict(ErnieForPreTraining, tmp_path / "reference")(**batch)
    token_mask = batch["attention_mask"] == 1
    assert_close(outputs.prediction_logits[token_mask], expected.prediction_logits[token_mask])
    assert_close(outputs.next_sentence_logits, expected.seq_relationship_logits)
    model.export_reference(tmp_path / "masked-lm")
    masked_lm = ErnieForMaskedLM.from_pretrained(tmp_path / "masked-lm").eval()
    assert_close(masked_lm(**batch).logits[token_mask], expected.prediction_logits[token_mask])
    reloaded = load_strict(CtxErnieForPreTraining, tmp_path / "reference")
    assert_same_outputs(reloaded(**batch), outputs, batch["attention_mask"])
