"""Heads of all types with transformers' Trainer and Seq2SeqTrainer, and CtxTrainer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch._dynamo.utils import counters
from training_runs import trainer_arguments, unbatch
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from zoo import ARCHETYPES, HEADS, REPRESENTATIVES, Case, make_batch, make_targets, make_training_batch
from zoo.batches import follow_labels

from hf_ctxmodels.training.trainer import CtxTrainer
from hf_ctxmodels.training.training_step import INDEX_KEY, TrainingStep

MULTI_TERM_HEADS = [case for case in HEADS if not case.model_class.accepts_loss_kwargs]


def mark_others_slow(cases: list[Case], *names: str) -> list[Any]:
    """Parameters of a test; all but the cases with these names are slow."""
    return [pytest.param(case, marks=() if str(case) in names else pytest.mark.slow) for case in cases]


# one loss, several losses, a state across batches; generator and discriminator
SINGLE_LOSS, SEVERAL_LOSSES, RECURRENT, GENERATOR = (
    "bert-AutoModelForMaskedLM",
    "bert-AutoModelForPreTraining",
    "ulmfit-AutoModelForCausalLM",
    "electra-AutoModelForPreTraining",
)


@pytest.fixture(params=ARCHETYPES, ids=str)
def head(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def make_trainer(head: Case, tmp_path) -> Callable[..., Trainer]:
    """A function that makes a Trainer for the head's training batch; keyword arguments go to TrainingArguments."""

    def make(
        model: Any = None,
        batch: dict[str, torch.Tensor] | None = None,
        compute_metrics: Any = None,
        trainer_class: type[Trainer] = Trainer,
        **arguments: Any,
    ) -> Trainer:
        defaults = {"per_device_train_batch_size": 16, "learning_rate": 5e-3, "logging_strategy": "no"}
        batch = make_training_batch(head, 32, seed=1)[0] if batch is None else batch
        rows = [row | {"row_number": index} for index, row in enumerate(unbatch(batch))]  # not a model input
        return trainer_class(
            model=head.model() if model is None else model,
            args=trainer_arguments(tmp_path, **(defaults | arguments)),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=compute_metrics,
        )

    return make


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal_weights(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0
) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "head",
    mark_others_slow([case for case in ARCHETYPES if not case.is_recurrent], SEVERAL_LOSSES),
    ids=str,
    indirect=True,
)
def test_training_reduces_loss(head, make_trainer):
    batch, baseline = make_training_batch(head, 64, seed=1)
    trainer = make_trainer(batch=batch, max_steps=40, lr_scheduler_type="constant")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.5 * baseline < before


def ignore_rows(head: Case, batch: dict[str, torch.Tensor]) -> None:
    """Ignore targets so that the quarters of 16 rows have very different counts, different for each term."""
    ignored = ([0, 1, 2, 3, 5, 13], [2, 4, 9, 10, 11], [0, 7])
    for rows, name in zip(ignored, head.compared_targets, strict=False):
        if not batch[name].is_floating_point():
            batch[name] = batch[name].clone()
            batch[name][rows] = -100
    follow_labels(head, batch)


def check_accumulation(head: Case, make_trainer: Any, batch: dict[str, torch.Tensor], trainer_class: Any) -> None:
    """Check that one batch of 16 rows and four of 4 give the same step."""
    steps = {}
    for size in (16, 4):
        model = head.model()
        before = weights(model)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size, "max_steps": 1}
        sgd = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
        make_trainer(model, batch, trainer_class=trainer_class, **sizes, **sgd).train()
        steps[size] = {name: tensor - before[name] for name, tensor in weights(model).items()}
    assert max(float(step.abs().max()) for step in steps[16].values()) > 1e-3
    assert_equal_weights(steps[4], steps[16], tolerance=1e-6)


@pytest.mark.parametrize(
    "head", mark_others_slow(ARCHETYPES, SINGLE_LOSS, RECURRENT, GENERATOR), ids=str, indirect=True
)
def test_accumulation_equals_large_batch(head, make_trainer):
    if head.uses_batch_norm:
        pytest.skip("batch normalization depends on the batch")
    batch, _ = make_training_batch(head, 16, seed=2)
    if head.model_class.accepts_loss_kwargs:
        ignore_rows(head, batch)
    elif head.computes_logits_of_labels_only and not head.is_seq2seq:
        # Trainer passes one count, so a head with several terms takes the mean of the batches' means: equal counts.
        batch["labels"][:, :1] = batch["labels"][:, 2:] = -100
    check_accumulation(head, make_trainer, batch, Trainer)


@pytest.mark.parametrize("head", mark_others_slow(MULTI_TERM_HEADS, SEVERAL_LOSSES, GENERATOR), ids=str, indirect=True)
def test_accumulation_of_unequal_counts(head, make_trainer):
    if head.uses_batch_norm:
        pytest.skip("batch normalization depends on the batch")
    batch, _ = make_training_batch(head, 16, seed=2)
    ignore_rows(head, batch)
    check_accumulation(head, make_trainer, batch, CtxTrainer)


@pytest.mark.parametrize("head", MULTI_TERM_HEADS, ids=str, indirect=True)
def test_evaluation_of_multiple_terms(head, make_trainer):
    """`CtxTrainer` counts the targets of a batch as the head does."""
    batch, _ = make_training_batch(head, 16, seed=2)
    ignore_rows(head, batch)
    losses = [
        make_trainer(head.model(), batch, trainer_class=cls, per_device_eval_batch_size=16).evaluate()["eval_loss"]
        for cls in (Trainer, CtxTrainer)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    subset = {name: value for name, value in batch.items() if name == "labels" or name not in head.targets}
    if subset.keys() != batch.keys() and "labels" in subset:  # without the other terms
        metrics = make_trainer(head.model(), subset, trainer_class=CtxTrainer, per_device_eval_batch_size=16).evaluate()
        with torch.no_grad():
            assert metrics["eval_loss"] == pytest.approx(float(head.model()(**subset).loss), rel=1e-5)


@pytest.mark.parametrize(
    "head", mark_others_slow(ARCHETYPES, SEVERAL_LOSSES, RECURRENT, GENERATOR), ids=str, indirect=True
)
def test_resumed_run_equals_uninterrupted_run(head, make_trainer, tmp_path):
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    dropout = {name: 0.2 for name in ("hidden_dropout_prob",) if hasattr(head.config(), name)}
    uninterrupted = make_trainer(head.model(**dropout), **arguments)
    uninterrupted.train()
    resumed = make_trainer(head.model(seed=5, **dropout), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal_weights(weights(resumed.model), weights(uninterrupted.model))


@pytest.mark.parametrize("head", mark_others_slow(ARCHETYPES, SINGLE_LOSS, RECURRENT), ids=str, indirect=True)
def test_best_model_is_loaded(head, make_trainer, tmp_path):
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    # the loss falls: with the highest loss as the best, the best checkpoint is not the last one
    trainer = make_trainer(
        max_steps=8, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, **arguments
    )
    trainer.train()
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    best = max(losses, key=losses.__getitem__)
    assert best != 8, "the last checkpoint is the best one: the test is vacuous"
    saved = head.model_class.from_pretrained(tmp_path / f"checkpoint-{best}")
    assert_equal_weights(weights(trainer.model), weights(saved))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], abs=1e-5)


def test_evaluation_outputs(head, make_trainer):
    predictions: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predictions.append(prediction)
        return {"rows": float(len(np.atleast_1d(prediction.label_ids[0])))}

    batch, _ = make_training_batch(head, 10, seed=3)
    trainer = make_trainer(batch=batch, compute_metrics=compute_metrics, per_device_eval_batch_size=4)
    names = head.compared_targets
    assert set(trainer.label_names) >= set(names)
    metrics = trainer.evaluate()
    with torch.no_grad():
        expected = head.model()(**batch)
    if head.trains_static_embeddings:
        assert metrics["eval_loss"] > 0  # there are no logits
        return
    if not head.computes_logits_of_labels_only:  # else Trainer takes the mean of the batches
        assert metrics["eval_loss"] == pytest.approx(float(expected.loss), abs=1e-5)
    (prediction,) = predictions
    targets = prediction.label_ids if len(names) > 1 else (prediction.label_ids,)
    for name, target in zip(names, targets, strict=True):
        np.testing.assert_array_equal(target, batch[name].numpy())
    outputs = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
    ignored = {"loss", *trainer.model.config.keys_to_ignore_at_inference}
    expected_outputs = {name: value.numpy() for name, value in expected.items() if name not in ignored}
    assert any(name.endswith("logits") for name in expected_outputs)
    for (name, value), actual in zip(expected_outputs.items(), outputs, strict=True):
        if name.endswith("logits"):
            np.testing.assert_allclose(actual, value, atol=1e-5, err_msg=name)


def test_trainer_and_training_step_have_same_loss(head, make_trainer):
    batch, _ = make_training_batch(head, 8, seed=4)
    trainer = make_trainer(head.model())
    count = (
        trainer._get_num_items_in_batch([batch], torch.device("cpu")) if head.model_class.accepts_loss_kwargs else None
    )
    trainer_loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(head.model())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    halves = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 5), slice(5, 8))]
    for half in halves:
        half[INDEX_KEY] = torch.arange(len(half["input_ids"]))
    scalars, _ = TrainingStep(accelerator, model, optimizer, 0.0)(halves)
    torch.testing.assert_close(scalars["loss"], trainer_loss.detach(), atol=1e-5, rtol=0)


ENCODER_DECODERS = [
    case
    for case in HEADS
    if case.auto_name == "AutoModelForSeq2SeqLM" and (case.config().is_encoder_decoder or case.is_recurrent)
]
MAX_LENGTH = 6
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "labels", "target_languages")


@pytest.mark.parametrize("case", ENCODER_DECODERS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_seq2seq_trainer(case: Case, tmp_path) -> None:
    model, batch = case.model(), make_batch(case, (5, 3, 4, 5, 2, 3, 4, 5, 5, 3, 2, 4))
    batch = batch | make_targets(case, batch)
    batch = {name: tensor for name, tensor in batch.items() if name in MODEL_INPUTS}
    predictions: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predictions.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    sizes = {"max_steps": 3, "per_device_train_batch_size": 5, "per_device_eval_batch_size": 4, "learning_rate": 5e-3}
    generation = {"predict_with_generate": True, "generation_max_length": MAX_LENGTH, "generation_num_beams": 2}
    arguments = trainer_arguments(tmp_path, Seq2SeqTrainingArguments, **sizes, **generation)
    data = Dataset.from_dict({name: tensor.tolist() for name, tensor in batch.items()})
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute_metrics)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert trainer.evaluate()["eval_rows"] == 12
    steps = batch["labels"].shape[1]
    np.testing.assert_array_equal(predictions[0].label_ids[:, :steps], batch["labels"].numpy())
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    settings = {"max_length": MAX_LENGTH, "num_beams": 2}
    with torch.no_grad():
        generated = model.eval().generate(**inputs, **settings)
        batches = [
            {name: tensor[rows] for name, tensor in batch.items()} for rows in (range(4), range(4, 8), range(8, 12))
        ]
        losses = [model(**rows_batch).loss.item() / 3 for rows_batch in batches]
    assert len(generated.unique()) > 2, "the text has too few tokens for a comparison"
    width = generated.shape[1]
    np.testing.assert_array_equal(predictions[0].predictions[:, :width], generated.numpy())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses), abs=1e-5)


@pytest.mark.parametrize("case", [case for case in HEADS if case.auto_name == "AutoModelForCausalLM"], ids=str)
def test_label_smoothing_of_causal_models(case: Case, tmp_path) -> None:
    """Trainer smooths the same targets as without smoothing: the next tokens, if the head shifts the labels."""
    model, batch = case.model(), make_batch(case, (9, 9), masked=False)
    labels = batch["input_ids"].clone()
    labels[0, :4] = -100
    trainer = Trainer(model, trainer_arguments(tmp_path, label_smoothing_factor=0.1))
    with torch.no_grad():
        loss = trainer.compute_loss(model, {**batch, "labels": labels})
        logits = model(**batch).logits
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if case.shifts_labels else labels
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "elmo"])
def test_number_of_input_tokens(family: str, tmp_path) -> None:
    """A word of ELMo is a token with several ids, its characters."""
    case = next(case for case in HEADS if str(case) == f"{family}-AutoModelForTokenClassification")
    batch, counts = make_batch(case, (9, 4, 6, 9)), {}
    rows = unbatch(batch | make_targets(case, batch))
    for counting in ("all", "non_padding"):
        arguments = {"max_steps": 1, "per_device_train_batch_size": 4, "include_num_input_tokens_seen": counting}
        trainer = CtxTrainer(case.model(), trainer_arguments(tmp_path, **arguments), train_dataset=rows)
        trainer.train()
        counts[counting] = trainer.state.num_input_tokens_seen
    assert counts == {"all": 4 * 9, "non_padding": 9 + 4 + 6 + 9}


PACKED_HEADS = (
    *("bert-AutoModelForMaskedLM", "gpt2-AutoModelForCausalLM", "t5-AutoModelForSeq2SeqLM"),
    *("xlnet-AutoModelForCausalLM", "unilm-AutoModelForSeq2SeqLM"),
)


@pytest.mark.parametrize(
    "case", mark_others_slow([case for case in REPRESENTATIVES if case.has_attention], *PACKED_HEADS), ids=str
)
def test_neftune_noise_is_equal_without_padding(case: Case, tmp_path) -> None:
    """The noise of `TrainingArguments(neftune_noise_alpha=...)` depends on the padded length."""
    batch = make_batch(case, (9, 4, 6, 9))
    rows, losses = unbatch(batch | make_targets(case, batch)), []
    for options, alpha in (({}, 50.0), ({"unpad": False}, 50.0), ({}, None)):
        arguments = trainer_arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, neftune_noise_alpha=alpha)
        losses.append(Trainer(case.model(**options), arguments, train_dataset=rows).train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


@pytest.mark.slow
def test_trainer_compiles_without_graph_breaks(tmp_path, monkeypatch, fresh_accelerate) -> None:
    """`TrainingArguments(torch_compile=True)`; with the backend aot_eager, since code generation takes minutes."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # TrainingArguments sets it; restored after the test
    case = next(case for case in HEADS if str(case) == "bert-AutoModelForMaskedLM")
    rows = unbatch(make_training_batch(case, 32, seed=1)[0])
    losses = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        counters.clear()
        arguments = trainer_arguments(tmp_path, max_steps=3, seed=0, **options)
        losses.append(Trainer(case.model(), arguments, train_dataset=rows).train().training_loss)
    assert counters["stats"]["unique_graphs"] in (1, 2)
    assert not counters["graph_break"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
