"""A student that learns: the teacher stays as it is, the student is saved alone, and runs go on exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distillation_models import VOCABULARY, batch_of, classifier, features, new_model, padded
from safetensors.torch import load_file
from training_runs import trainer_arguments
from transformers import AutoModelForMaskedLM, DistilBertForMaskedLM, DistilBertModel, Trainer
from zoo import assert_close

import hf_ctxmodels
from hf_ctxmodels import CtxBertForMaskedLM, CtxBertModel
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
from hf_ctxmodels.compression.distillation.model import PROJECTIONS_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.loop import TrainingLoop
from hf_ctxmodels.training.model_loading import load_family_config
from hf_ctxmodels.training.trainer import CtxTrainer
from hf_ctxmodels.training.training_log import read_log
from hf_ctxmodels.training.training_step import EpochIndexed

TERMS = [SoftTargetLoss(weight=5.0), HardTargetLoss(weight=2.0), HiddenStateLoss()]
ROWS = [row for seed in range(4) for row in features(seed)]


def taught(dropout: float = 0.0) -> CtxDistillationModel:
    return CtxDistillationModel(new_model(2, hidden_size=4, dropout=dropout), new_model(4, seed=1, dropout=0.5), TERMS)


def by_loop(model: CtxDistillationModel, folder: Path, steps: int, **more: Any) -> list[dict[str, float]]:
    fixed: dict[str, Any] = {"per_device_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler": "constant"}
    fixed |= {"logging_steps": 1, "save_steps": 2, "dataloader_workers": 0}
    options = LoopArguments(output_dir=str(folder), max_steps=steps, **{**fixed, **more})
    accelerator = make_accelerator(options)
    TrainingLoop(model, EpochIndexed(ROWS), DistillationCollator(padded), options, accelerator).run()
    return read_log(folder)


def same_weights(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_the_teacher_is_as_it_was_and_the_student_is_saved_alone(tmp_path):
    model = taught(dropout=0.2)
    before = {name: tensor.clone() for name, tensor in model.teacher.state_dict().items()}
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_loop(model, tmp_path, 4)
    teacher = model.teacher
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert not any(module.training for module in teacher.modules())
    assert teacher not in list(model.modules())
    assert not any(torch.equal(p, start[name]) for name, p in model.named_parameters()), "all others are trained"
    saved, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(saved) is CtxBertForMaskedLM
    assert not any(report.values())
    assert same_weights(saved, model.student)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["CtxBertForMaskedLM"]
    projections = load_file(tmp_path / PROJECTIONS_FILE)
    assert all(torch.equal(tensor, projections[name]) for name, tensor in model.projections.state_dict().items())
    assert model.num_parameters() == saved.num_parameters()


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path):
    whole, part = taught(dropout=0.2), taught(dropout=0.2)
    log = by_loop(whole, tmp_path / "whole", 4)
    by_loop(part, tmp_path / "part", 2)
    gone_on = taught(dropout=0.2)
    resumed = by_loop(gone_on, tmp_path / "part", 4, resume=True)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in log]
    assert {"soft_targets_loss", "hard_targets_loss", "hidden_loss"} < log[0].keys()
    assert same_weights(whole, gone_on)
    for name in (PROJECTIONS_FILE, "model.safetensors"):
        (tmp_path / "part" / "checkpoint-4" / name).rename(tmp_path / name)
    (tmp_path / PROJECTIONS_FILE).unlink()
    with pytest.raises(CtxError, match="projections are missing"):
        taught().load_saved_weights(tmp_path)


def test_accumulated_steps_are_those_of_one_batch(tmp_path):
    """By plain SGD: Adam makes steps of what is rounding, as in the biases of keys."""
    whole, parts = taught(), taught()
    by_loop(whole, tmp_path / "whole", 2, optimizer="sgd")
    by_loop(parts, tmp_path / "parts", 2, optimizer="sgd", per_device_batch_size=1, gradient_accumulation_steps=4)
    for name, tensor in parts.state_dict().items():
        assert_close(tensor, whole.state_dict()[name], name, 1e-5)


def test_trainer_trains_saves_and_resumes_a_student(tmp_path):
    def trainer(model: CtxDistillationModel, folder: str, kind: type = Trainer, batch: int = 4, **more: Any) -> Any:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        schedule = {"max_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", **more}
        saving = {"save_strategy": "steps", "save_steps": 1, "remove_unused_columns": False}
        options = trainer_arguments(tmp_path / folder, **sizes, **schedule, **saving)
        return kind(model, options, data_collator=DistillationCollator(padded), train_dataset=ROWS)

    plain, exact, accumulated = (taught() for _ in range(3))
    trainer(plain, "plain", optim="adamw_torch").train()
    trainer(exact, "exact").train()
    trainer(accumulated, "accumulated", CtxTrainer, batch=1).train()
    for name, tensor in accumulated.state_dict().items():
        assert_close(tensor, exact.state_dict()[name], name, 1e-5)
    saved, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "plain" / "checkpoint-2", output_loading_info=True)
    assert not any(report.values())
    assert same_weights(saved, plain.student)
    resumed = taught()
    checkpoint = tmp_path / "plain" / "checkpoint-1"
    assert resumed.load_projections(checkpoint)
    trainer(resumed, "plain", optim="adamw_torch").train(resume_from_checkpoint=str(checkpoint))
    assert same_weights(resumed, plain)


def test_evaluation_is_the_students_own_and_each_model_reads_its_own_tokens():
    model = taught().eval()
    batch = padded(features())
    with torch.no_grad():
        own, through = model.student(**batch), model(**batch)
        measured = model(**batch_of(features()))
    assert torch.equal(own.loss, through.loss)
    assert torch.equal(own.logits, through.logits)
    assert measured.soft_targets_loss > 0
    assert_close(measured.hard_targets_loss, own.loss)
    with pytest.raises(CtxError, match="needs input_ids"):
        model.train()(inputs_embeds=torch.zeros(1, 3, 8))
    with pytest.raises(CtxError, match="not a list of losses"):
        CtxDistillationModel(model.student, model.teacher, ["soft-targets"])

    # a teacher with another vocabulary, by its own inputs, whose lengths differ from the student's
    student, teacher = classifier(2), classifier(4, seed=1, vocab_size=VOCABULARY + 9)
    rows = features()
    others = [{**row, "input_ids": torch.cat([row["input_ids"] + 9, row["input_ids"][:1]])} for row in rows]
    collate = DistillationCollator(
        lambda rows: padded(rows, "rows"),
        lambda rows: {name: value for name, value in padded(rows, "rows").items() if name != "labels"},
    )
    batch = collate(
        [{**row, **{f"teacher_{name}": value for name, value in other.items()}} for row, other in zip(rows, others)]
    )
    loss = CtxDistillationModel(student, teacher, [LogitLoss()])(**batch).loss
    with torch.no_grad():
        wanted = torch.cat([teacher(input_ids=row["input_ids"][None]).logits for row in others])
    own = torch.cat([student(input_ids=row["input_ids"][None]).logits for row in rows])
    assert_close(loss, (own - wanted).square().mean())


def test_a_student_of_some_layers_is_exported_as_distilbert(tmp_path):
    teacher = new_model(4, seed=1)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in teacher.parameters():  # norms and biases too, which start alike
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    student = new_model(2, type_vocab_size=0)
    copy_layers(student, teacher, [0, 3])
    for own, number in zip(student.bert.layers, (0, 3), strict=True):
        assert same_weights(own, teacher.bert.layers[number])
    CtxDistillationModel(student, teacher, [CosineLoss()]).student.export_reference(tmp_path / "mlm")
    encoder = CtxBertModel(student.config, add_pooling_layer=False)
    encoder.load_state_dict(student.bert.state_dict())
    encoder.export_reference(tmp_path / "base")
    batch = {name: value for name, value in padded(features()).items() if name != "labels"}
    tokens = batch["attention_mask"] == 1
    for kind, converted, folder, field in (
        (DistilBertForMaskedLM, student, "mlm", "logits"),
        (DistilBertModel, encoder, "base", "last_hidden_state"),
    ):
        reference, report = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        assert reference.num_parameters() == converted.num_parameters()
        assert torch.equal(reference.get_input_embeddings().weight, converted.get_input_embeddings().weight)
        with torch.no_grad():
            segments = torch.ones_like(batch["input_ids"])
            got = getattr(converted.eval()(**batch, token_type_ids=segments), field)
            assert_close(got[tokens], getattr(reference.eval()(**batch), field)[tokens], folder, 1e-6)
    for refused, message in (
        (classifier(2, type_vocab_size=0), "does not support the head"),
        (CtxBertModel(student.config), "no pooler"),
        (new_model(2, type_vocab_size=0, layer_norm_eps=1e-5), "layer_norm_eps"),
    ):
        with pytest.raises(CtxError, match=message):
            refused.export_reference(tmp_path / "refused")
    with pytest.raises(CtxError, match="different shapes"):
        copy_layers(new_model(2, hidden_size=4), teacher, [0, 1])


def test_distilbert_of_transformers_is_opened(tmp_path, subtests):
    """As a BERT without segments, with the same outputs; heads of another function are refused."""
    fields = {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
    config = transformers.DistilBertConfig(**fields, dropout=0.3, attention_dropout=0.2, activation="relu")
    batch = {"input_ids": torch.randint(5, 60, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    batch["attention_mask"][1, 6:] = 0
    tokens = batch["attention_mask"] == 1
    for name in ("ForMaskedLM", "Model", "ForTokenClassification", "ForQuestionAnswering"):
        with subtests.test(name=name):
            torch.manual_seed(0)
            reference = getattr(transformers, f"DistilBert{name}")(config).eval()
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            reference.save_pretrained(tmp_path / name)
            options = {"add_pooling_layer": False} if name == "Model" else {}
            kind = getattr(hf_ctxmodels, f"CtxBert{name}")
            converted, report = kind.from_pretrained(tmp_path / name, output_loading_info=True, **options)
            assert not any(report.values()), report
            assert (converted.config.type_vocab_size, converted.config.hidden_dropout_prob) == (0, 0.3)
            with torch.no_grad():
                expected, outputs = reference(**batch), converted(**batch)
            for field in expected:
                assert_close(outputs[field][tokens], expected[field][tokens], field, 1e-5)
            assert type(load_family_config(tmp_path / name)) is type(converted.config)
            converted.save_pretrained(tmp_path / "own")
            assert torch.equal(kind.from_pretrained(tmp_path / "own", **options)(**batch)[0], outputs[0])
    for name in ("ForSequenceClassification", "ForMultipleChoice"):
        getattr(transformers, f"DistilBert{name}")(config).save_pretrained(tmp_path / name)
        with pytest.raises(CtxError, match="with ReLU"):
            getattr(hf_ctxmodels, f"CtxBert{name}").from_pretrained(tmp_path / name)
