"""Distillation models: frozen teacher, saved student, resumed runs, `Trainer`, and DistilBERT checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distillation_models import VOCABULARY, collate_padded, distillation_batch, features, make_classifier, new_model
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from training_runs import trainer_arguments
from transformers import AutoModelForMaskedLM, DistilBertForMaskedLM, DistilBertModel, Trainer
from zoo import assert_close

import hf_ctxmodels
from hf_ctxmodels import (
    CtxBertConfig,
    CtxBertForMaskedLM,
    CtxBertForNextSentencePrediction,
    CtxBertForQuestionAnswering,
    CtxBertForSequenceClassification,
    CtxBertModel,
    CtxBertTokenizer,
)
from hf_ctxmodels.compression.distillation import (
    CosineLoss,
    CtxDistillationModel,
    DistillationCollator,
    HardTargetLoss,
    HiddenStateLoss,
    LogitLoss,
    SoftTargetLoss,
    copy_layers,
)
from hf_ctxmodels.compression.distillation.distillation_setup import Teacher
from hf_ctxmodels.compression.distillation.model import PROJECTIONS_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.loop import TrainingLoop
from hf_ctxmodels.training.model_loading import load_family_config
from hf_ctxmodels.training.trainer import CtxTrainer
from hf_ctxmodels.training.training_log import read_log
from hf_ctxmodels.training.training_step import EpochIndexed

LOSSES = [SoftTargetLoss(weight=5.0), HardTargetLoss(weight=2.0), HiddenStateLoss()]
ROWS = [row for seed in range(4) for row in features(seed)]


def distillation_model(dropout: float = 0.0) -> CtxDistillationModel:
    return CtxDistillationModel(new_model(2, hidden_size=4, dropout=dropout), new_model(4, seed=1, dropout=0.5), LOSSES)


def train(model: CtxDistillationModel, folder: Path, steps: int, **overrides: Any) -> list[dict[str, float]]:
    defaults: dict[str, Any] = {"per_device_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler": "constant"}
    defaults |= {"logging_steps": 1, "save_steps": 2, "dataloader_workers": 0}
    options = LoopArguments(output_dir=str(folder), max_steps=steps, **{**defaults, **overrides})
    accelerator = make_accelerator(options)
    TrainingLoop(model, EpochIndexed(ROWS), DistillationCollator(collate_padded), options, accelerator).run()
    return read_log(folder)


def have_same_weights(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_only_student_is_trained_and_saved(tmp_path):
    model = distillation_model(dropout=0.2)
    teacher_weights = {name: tensor.clone() for name, tensor in model.teacher.state_dict().items()}
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, tmp_path, 4)
    teacher = model.teacher
    assert all(torch.equal(tensor, teacher_weights[name]) for name, tensor in teacher.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert not any(module.training for module in teacher.modules())
    assert teacher not in list(model.modules())
    assert not any(torch.equal(p, initial[name]) for name, p in model.named_parameters()), "untrained student weight"
    saved, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(saved) is CtxBertForMaskedLM
    assert not any(report.values())
    assert have_same_weights(saved, model.student)
    assert read_json(tmp_path / "config.json")["architectures"] == ["CtxBertForMaskedLM"]
    projections = load_file(tmp_path / PROJECTIONS_FILE)
    assert all(torch.equal(tensor, projections[name]) for name, tensor in model.projections.state_dict().items())
    assert model.num_parameters() == saved.num_parameters()


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    uninterrupted, interrupted = distillation_model(dropout=0.2), distillation_model(dropout=0.2)
    expected_log = train(uninterrupted, tmp_path / "whole", 4)
    train(interrupted, tmp_path / "part", 2)
    resumed = distillation_model(dropout=0.2)
    resumed_log = train(resumed, tmp_path / "part", 4, resume=True)
    assert [row["loss"] for row in resumed_log] == [row["loss"] for row in expected_log]
    assert {"soft_targets_loss", "hard_targets_loss", "hidden_loss"} < expected_log[0].keys()
    assert have_same_weights(uninterrupted, resumed)
    for name in (PROJECTIONS_FILE, "model.safetensors"):
        (tmp_path / "part" / "checkpoint-4" / name).rename(tmp_path / name)
    (tmp_path / PROJECTIONS_FILE).unlink()
    with pytest.raises(CtxError, match="projections are missing"):
        distillation_model().load_saved_weights(tmp_path)


def test_gradient_accumulation_equals_full_batch(tmp_path):
    """With SGD: Adam amplifies rounding errors of zero gradients, such as those of key biases."""
    full_batch, accumulated = distillation_model(), distillation_model()
    train(full_batch, tmp_path / "whole", 2, optimizer="sgd")
    train(accumulated, tmp_path / "parts", 2, optimizer="sgd", per_device_batch_size=1, gradient_accumulation_steps=4)
    for name, tensor in accumulated.state_dict().items():
        assert_close(tensor, full_batch.state_dict()[name], name, 1e-5)


def test_trainer_trains_saves_and_resumes_student(tmp_path):
    def trainer(model: CtxDistillationModel, folder: str, cls: type = Trainer, batch: int = 4, **kwargs: Any) -> Any:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        schedule = {"max_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", **kwargs}
        saving = {"save_strategy": "steps", "save_steps": 1, "remove_unused_columns": False}
        options = trainer_arguments(tmp_path / folder, **sizes, **schedule, **saving)
        return cls(model, options, data_collator=DistillationCollator(collate_padded), train_dataset=ROWS)

    adamw_model, sgd_model, accumulated_model = (distillation_model() for _ in range(3))
    trainer(adamw_model, "plain", optim="adamw_torch").train()
    trainer(sgd_model, "exact").train()
    trainer(accumulated_model, "accumulated", CtxTrainer, batch=1).train()
    for name, tensor in accumulated_model.state_dict().items():
        assert_close(tensor, sgd_model.state_dict()[name], name, 1e-5)
    saved, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "plain" / "checkpoint-2", output_loading_info=True)
    assert not any(report.values())
    assert have_same_weights(saved, adamw_model.student)
    resumed_model = distillation_model()
    checkpoint = tmp_path / "plain" / "checkpoint-1"
    assert resumed_model.load_projections(checkpoint)
    trainer(resumed_model, "plain", optim="adamw_torch").train(resume_from_checkpoint=str(checkpoint))
    assert have_same_weights(resumed_model, adamw_model)


def test_teacher_has_the_same_tokens():
    """Tokens, ids and normalization are compared."""
    words, others = ["The old cat sat"] * 9, ["a new dog ran"] * 9
    teacher = Teacher("", CtxBertConfig(), CtxBertTokenizer.train(words, 60))
    assert teacher.has_same_tokens(CtxBertTokenizer.train(words, 60))
    assert not teacher.has_same_tokens(CtxBertTokenizer.train(others, 60))
    assert not teacher.has_same_tokens(CtxBertTokenizer(vocab=teacher.tokenizer.get_vocab(), do_lower_case=False))


def test_evaluation_loss_and_separate_teacher_inputs():
    model = distillation_model().eval()
    batch = collate_padded(features())
    with torch.no_grad():
        student_output, distillation_output = model.student(**batch), model(**batch)
        counted_output = model(**distillation_batch(features()))
    assert torch.equal(student_output.loss, distillation_output.loss)
    assert torch.equal(student_output.logits, distillation_output.logits)
    assert counted_output.soft_targets_loss > 0
    assert_close(counted_output.hard_targets_loss, student_output.loss)
    with pytest.raises(CtxError, match="needs input_ids"):
        model.train()(inputs_embeds=torch.zeros(1, 3, 8))
    with pytest.raises(CtxError, match="not a list of losses"):
        CtxDistillationModel(model.student, model.teacher, ["soft-targets"])

    # a teacher with another vocabulary and separate inputs, whose lengths differ from the student's
    student, teacher = make_classifier(2), make_classifier(4, seed=1, vocab_size=VOCABULARY + 9)
    rows = features()
    teacher_rows = [{**row, "input_ids": torch.cat([row["input_ids"] + 9, row["input_ids"][:1]])} for row in rows]
    collate = DistillationCollator(
        lambda rows: collate_padded(rows, "rows"),
        lambda rows: {name: value for name, value in collate_padded(rows, "rows").items() if name != "labels"},
    )
    batch = collate(
        [
            {**row, **{f"teacher_{name}": value for name, value in teacher_row.items()}}
            for row, teacher_row in zip(rows, teacher_rows)
        ]
    )
    loss = CtxDistillationModel(student, teacher, [LogitLoss()])(**batch).loss
    with torch.no_grad():
        teacher_logits = torch.cat([teacher(input_ids=row["input_ids"][None]).logits for row in teacher_rows])
    student_output = torch.cat([student(input_ids=row["input_ids"][None]).logits for row in rows])
    assert_close(loss, (student_output - teacher_logits).square().mean())


def test_student_of_copied_layers_exports_to_distilbert(tmp_path):
    teacher = new_model(4, seed=1)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in teacher.parameters():  # also norms and biases, which are initialized as constants
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    student = new_model(2, type_vocab_size=0)
    copy_layers(student, teacher, [0, 3])
    for student_layer, number in zip(student.bert.layers, (0, 3), strict=True):
        assert have_same_weights(student_layer, teacher.bert.layers[number])
    CtxDistillationModel(student, teacher, [CosineLoss()]).student.export_reference(tmp_path / "mlm")
    encoder = CtxBertModel(student.config, add_pooling_layer=False)
    encoder.load_state_dict(student.bert.state_dict())
    encoder.export_reference(tmp_path / "base")
    batch = {name: value for name, value in collate_padded(features()).items() if name != "labels"}
    is_token = batch["attention_mask"] == 1
    for reference_class, converted, folder, field in (
        (DistilBertForMaskedLM, student, "mlm", "logits"),
        (DistilBertModel, encoder, "base", "last_hidden_state"),
    ):
        reference, report = reference_class.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        assert reference.num_parameters() == converted.num_parameters()
        assert torch.equal(reference.get_input_embeddings().weight, converted.get_input_embeddings().weight)
        with torch.no_grad():
            segments = torch.ones_like(batch["input_ids"])
            actual = getattr(converted.eval()(**batch, token_type_ids=segments), field)
            assert_close(actual[is_token], getattr(reference.eval()(**batch), field)[is_token], folder, 1e-6)
    with pytest.raises(CtxError, match="different shapes"):
        copy_layers(new_model(2, hidden_size=4), teacher, [0, 1])


@pytest.mark.parametrize(
    "model",
    [
        make_classifier(2, type_vocab_size=0),
        CtxBertModel(new_model(2, type_vocab_size=0).config),
        new_model(2, type_vocab_size=0, layer_norm_eps=1e-5),
        new_model(2, type_vocab_size=0, layer_norm_eps=1e-5, pooler_act="relu"),
    ],
    ids=["tanh classifier", "pooler", "layer norm", "unused activation"],
)
def test_export_without_segments_to_bert(model, tmp_path):
    """What DistilBERT does not support is a BERT whose segment embeddings are zero."""
    model.eval().export_reference(tmp_path)
    reference_class = getattr(transformers, type(model).__name__.removeprefix("Ctx"))
    reference, report = reference_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    batch = {name: value for name, value in collate_padded(features()).items() if name != "labels"}
    is_token = batch["attention_mask"] == 1
    with torch.no_grad():
        expected = reference.double()(**batch, token_type_ids=torch.ones_like(batch["input_ids"]))
        outputs = model.double()(**batch)
    for field in expected:
        tokens = is_token if expected[field].dim() == 3 else slice(None)
        assert_close(outputs[field][tokens], expected[field][tokens], field, 1e-6)
    assert model.config.type_vocab_size == 0
    assert model.base_model.embeddings.token_type_embeddings is None


def test_pooler_activation_without_reference_raises(tmp_path):
    model = new_model(2, CtxBertForNextSentencePrediction, type_vocab_size=0, pooler_act="relu")
    with pytest.raises(CtxError, match="does not support pooler_act='relu'"):
        model.export_reference(tmp_path)
    with pytest.raises(StrictDataclassError, match="only a DistilBERT"):
        new_model(2, pooler_act="relu")


def test_export_of_subclass_outside_package(tmp_path):
    class Classifier(CtxBertForSequenceClassification):
        pass

    for expected, options in (("DistilBert", {"type_vocab_size": 0, "pooler_act": "relu"}), ("Bert", {})):
        new_model(2, Classifier, **options).export_reference(tmp_path)
        assert read_json(tmp_path / "config.json")["architectures"] == [f"{expected}ForSequenceClassification"]


def test_exported_question_answering_has_two_labels(tmp_path):
    """In transformers the number of labels is the size of the head."""
    new_model(2, CtxBertForQuestionAnswering, type_vocab_size=0, num_labels=3).export_reference(tmp_path)
    _, report = transformers.DistilBertForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(
    ("architecture", "rate"),
    [("SequenceClassification", 0.3), ("MaskedLM", 0.3), ("QuestionAnswering", 0.4), ("TokenClassification", 0.1)],
)
def test_dropout_of_distilbert_head(architecture, rate, tmp_path):
    config = transformers.DistilBertConfig(
        seq_classif_dropout=0.3, qa_dropout=0.4, dropout=0.1, architectures=[f"DistilBertFor{architecture}"]
    )
    config.save_pretrained(tmp_path)
    assert CtxBertConfig.from_pretrained(tmp_path).head_dropout == rate


def test_transformers_distilbert_loads_as_bert(tmp_path, subtests):
    """The BERT has no segments, equal outputs, and is exported as the same class."""
    fields = {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
    config = transformers.DistilBertConfig(**fields, dropout=0.3, attention_dropout=0.2, activation="relu")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (3, 9), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    batch["attention_mask"][1, 6:] = 0
    is_token = batch["attention_mask"] == 1
    classifiers = ("ForSequenceClassification", "ForMultipleChoice")
    for name in ("ForMaskedLM", "Model", "ForTokenClassification", "ForQuestionAnswering", *classifiers):
        with subtests.test(name=name):
            torch.manual_seed(0)
            reference = getattr(transformers, f"DistilBert{name}")(config).eval()
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            reference.save_pretrained(tmp_path / name)
            options = {"add_pooling_layer": False} if name == "Model" else {}
            model_class = getattr(hf_ctxmodels, f"CtxBert{name}")
            converted, report = model_class.from_pretrained(tmp_path / name, output_loading_info=True, **options)
            assert not any(report.values()), report
            assert (converted.config.type_vocab_size, converted.config.hidden_dropout_prob) == (0, 0.3)
            inputs = {key: value[None] for key, value in batch.items()} if name == "ForMultipleChoice" else batch
            tokens = slice(None) if name in classifiers else is_token
            with torch.no_grad():
                expected, outputs = reference(**inputs), converted(**inputs)
            for field in expected:
                assert_close(outputs[field][tokens], expected[field][tokens], field, 1e-5)
            assert type(load_family_config(tmp_path / name)) is type(converted.config)
            converted.save_pretrained(tmp_path / "native")
            reloaded = model_class.from_pretrained(tmp_path / "native", **options)
            weights = reloaded.state_dict()
            assert all(torch.equal(weights[key], weight) for key, weight in converted.state_dict().items())
            # the products of some processors depend on the addresses of the weights
            assert_close(reloaded(**inputs)[0], outputs[0], "reloaded", 1e-6)
            load_saved_model(tmp_path / name).export_reference(tmp_path / "exported")
            exported, report = type(reference).from_pretrained(tmp_path / "exported", output_loading_info=True)
            assert not any(report.values()), report
            with torch.no_grad():
                assert_close(exported.eval()(**inputs)[0], expected[0], "exported", 1e-6)
