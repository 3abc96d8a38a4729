"""`hf-ctxmodels finetune`: all tasks with tiny models of all families and of transformers; resuming; invalid flags."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import run_command, run_in_two_processes
from labeled_texts import (
    GOOD,
    choice_files,
    classification_files,
    pair_files,
    regression_files,
    save_tiny,
    squad_files,
    tagging_files,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.cli.finetune import prediction_command
from hf_ctxmodels.downstream.networks.creation import needs_network
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.hub import model_card
from hf_ctxmodels.inference import Predictor
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

finetune = partial(run_command, "finetune")
QUICK = {"max_steps": 50, "learning_rate": "5e-3", "per_device_batch_size": 16, "max_length": 24}


ORIGINS = [(name, False) for name in FAMILIES] + [(name, True) for name, family in FAMILIES.items() if family.reference]


@pytest.fixture(scope="session")
def checkpoint(request, tmp_path_factory) -> str:
    name, from_transformers = request.param
    return save_tiny(tmp_path_factory.mktemp("checkpoint"), FAMILIES[name], from_transformers)


@pytest.fixture(scope="session")
def ctx_checkpoint(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("own"), next(iter(FAMILIES.values())), from_transformers=False)


TASK_FILES = {
    "sequence-classification": (classification_files, "accuracy"),
    "regression": (regression_files, "pearsonr"),
    "token-classification": (tagging_files, "f1"),
    "question-answering": (squad_files, "f1"),
    "multiple-choice": (choice_files, "accuracy"),
}


def task_params() -> list:
    """At least one task for each family, in turn; all tasks for an encoder of subwords and one of words.

    All tests of the first family and the first test of each architecture without recurrence are fast, the others slow.
    """
    params, seen_architectures = [], set()
    for family_index, (name, from_transformers) in enumerate(ORIGINS):
        case = Case(FAMILIES[name], "AutoModel")
        architecture = case.has_attention, case.is_recurrent, from_transformers
        for task_index, task in enumerate(TASK_FILES):
            if task_index != family_index % 2 and (name not in ("bert", "cvt") or from_transformers):
                continue
            is_quick = not case.is_recurrent and (family_index == 0 or architecture not in seen_architectures)
            seen_architectures.add(architecture)
            params.append(pytest.param((name, from_transformers), task, marks=() if is_quick else pytest.mark.slow))
    return params


def test_printed_prediction_command_selects_the_columns_of_training():
    task_arguments = TaskArguments("3", "-1", "4,5", target_language="<de>", both_orders=True)
    columns = ["--text_columns", "3", "--label_column", "-1", "--choice_columns", "4,5", "--target_language", "<de>"]
    command = prediction_command("runs/x", task_arguments)
    assert command == ["predict", "--model", "runs/x", "--input", "FILE", *columns]  # both_orders is saved
    # a number among names is a name, as in a table
    for saved in (TaskArguments(), TaskArguments("context, end", "answer", "a,b"), TaskArguments("1,context")):
        assert prediction_command("runs/x", saved) == command[:5]


def test_warning_if_model_is_below_tfidf(ctx_checkpoint, tmp_path, capsys):
    """The TF-IDF baseline and a warning are in the output, the summary and the model card."""
    out = tmp_path / "out"
    flags = {"model": ctx_checkpoint, "output_dir": out, **QUICK, "max_steps": 1, "learning_rate": 1e-9}
    assert finetune("sequence-classification", **flags, **classification_files(tmp_path)) == 0
    summary = TrainingSummary.load(out)
    assert summary.baselines["accuracy_tfidf"] == 1.0
    printed = capsys.readouterr().out
    score, majority = summary.metrics["eval_accuracy"], summary.baselines["accuracy"]
    assert f"accuracy{score:>29.4f}{majority:>13.4f}{1:>13.4f}  0 to 1\n" in printed
    warning = f"accuracy {score:.4f} is below 1.0000, the result of TF-IDF"
    assert f"{warning}; hint: try a higher --learning_rate" in printed.partition("next:")[0].splitlines()[-1]
    assert warning in summary.warnings
    card = str(model_card(out, "zoo/model"))
    assert f"| accuracy | {score:.4g} | {majority:.4g} | 1 | 0 to 1 |" in card
    assert f"- In this run {warning}." in card


@pytest.mark.parametrize(("checkpoint", "task"), task_params(), indirect=["checkpoint"], ids=str)
def test_task_is_learned_and_saved(checkpoint, task, tmp_path, capsys):
    """The task is learned and beats its baseline; model, summary and predictions are saved."""
    make_files, metric = TASK_FILES[task]
    config = AutoConfig.from_pretrained(checkpoint)
    families = [family for family in FAMILIES.values() if type(config) is family.config]
    steps = 150 if any(Case(family, "AutoModel").is_recurrent for family in families) else 50
    files, out, predictions_file = make_files(tmp_path), tmp_path / "out", tmp_path / "new" / "predictions.jsonl"
    flags = {"model": checkpoint, "output_dir": out, "predictions_file": predictions_file}
    status = finetune(task, **flags, **files, **QUICK | {"max_steps": steps})
    auto_class = TASKS[task].auto_class
    if needs_network(config, auto_class):
        assert status == 0
        assert f"has no head for {task}: it is trained with a task network" in capsys.readouterr().err
        assert TrainingSummary.load(out).task == task
        return
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        assert status == 2
        assert f"cannot be opened with {auto_class}" in capsys.readouterr().err
        return
    assert status == 0
    summary = TrainingSummary.load(out)
    score, baseline = summary.metrics[f"eval_{metric}"], summary.metrics[f"baseline_{metric}"]
    perfect = 100.0 if task == "question-answering" else 1.0
    assert score > 0.9 * perfect
    assert score > baseline or baseline == perfect  # the tagger's baseline is perfect: each word has one tag
    assert (summary.task, summary.steps, summary.dataset) == (task, steps, files["train_file"].name)
    printed = capsys.readouterr().out
    assert f"{score:.4f}" in printed
    assert f"{baseline:.4f}" in printed
    predictions = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    assert len(predictions) == 32
    assert all("prediction" in prediction for prediction in predictions)
    model = getattr(transformers, auto_class).from_pretrained(out)
    assert type(model).__name__ == summary.model_class
    assert AutoTokenizer.from_pretrained(out)("the film")["input_ids"]
    if task == "sequence-classification":
        results = pipeline("text-classification", model=str(out))(["the film was lovely", "the film was awful"])
        assert [result["label"] for result in results] == ["pos", "neg"]


@pytest.mark.parametrize("checkpoint", [("gpt", False)], indirect=True, ids=str)
def test_task_tokens_and_pairs_in_both_orders(checkpoint, tmp_path, capsys):
    """New tokens have newly initialized embeddings (standard deviation 0.1); pairs are read in both orders."""
    original = AutoTokenizer.from_pretrained(checkpoint)
    flags = QUICK | {"max_steps": 1, "learning_rate": 1e-9}
    assert finetune("regression", model=checkpoint, output_dir=tmp_path / "out", **pair_files(tmp_path), **flags) == 0
    assert "the embeddings of 3 new tokens are initialized" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert len(tokenizer) == len(original) + 3 == model.config.vocab_size
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("good", "bad").input_ids)
    assert [token for token in tokens if token[0] == "_"] == ["_start_", "_delimiter_", "_classify_"]
    new_embeddings = model.get_input_embeddings().weight[-3:]
    assert 0.07 < new_embeddings.std() < 0.13
    assert new_embeddings.mean().abs() < 0.04
    pair, swapped = tokenizer("lovely", "the film"), tokenizer("the film", "lovely")
    batch = tokenizer.pad([pair, swapped], return_tensors="pt")
    logits = [model(**{name: value[order][None] for name, value in batch.items()}).logits for order in ([0, 1], [1, 0])]
    torch.testing.assert_close(*logits)
    assert model.config.both_orders
    predictor = Predictor.open(str(tmp_path / "out"))
    (tmp_path / "pairs.tsv").write_text("one\tother\nlovely\tthe film\nthe film\tlovely\n")
    values = [result["value"] for result in predictor.predict_file(str(tmp_path / "pairs.tsv")).results]
    assert values == pytest.approx([logits[0].item()] * 2)
    (tmp_path / "texts.txt").write_text("lovely\n")
    with pytest.raises(CtxError, match="Only pairs of texts have two orders"):
        predictor.predict_file(str(tmp_path / "texts.txt"))
    # fine-tuned again on pairs in one order
    files = pair_files(tmp_path) | {"both_orders": "false"}
    assert finetune("regression", model=tmp_path / "out", output_dir=tmp_path / "again", **files, **flags) == 0
    assert not AutoConfig.from_pretrained(tmp_path / "again").both_orders


def classify(model: object, tmp_path: Path, *args: object, name: str = "out", **flags: object) -> int:
    """Fine-tune a text classifier on the files in `tmp_path`."""
    flags = {"model": model, "max_length": 24, "max_steps": 1, "output_dir": tmp_path / name, **flags}
    return finetune("sequence-classification", *args, **{**classification_files(tmp_path), **flags})


def test_invalid_flags(ctx_checkpoint, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("max_target_length: 20\n")
    for flags, message in (
        ({"max_length": 65}, "the model's limit of 64 positions"),
        ({"num_beams": 3}, "Unknown flag --num_beams"),
        ({"recipe": tmp_path / "recipe.yaml"}, "Unknown key 'max_target_length' in the recipe"),
        ({"train_examples": 5000}, "--train_examples 5000"),
        ({"config_options": "hiden_dropout_prob=0.25"}, "has no field hiden_dropout_prob"),
        ({"config_options": "classifier_pooling=max"}, "cannot have classifier_pooling='max'"),
    ):
        assert classify(ctx_checkpoint, tmp_path, **flags) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for columns, message in (
        ("one,other", "ForSequenceClassification does not support reading a pair in both orders"),
        ("one", "Only pairs of texts have two orders"),
    ):
        files = pair_files(tmp_path) | {"text_columns": columns}
        assert finetune("regression", model=ctx_checkpoint, output_dir=tmp_path / "out", **files, **QUICK) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "--both_orders" in error


def test_resumed_run_equals_uninterrupted_run(ctx_checkpoint, tmp_path):
    flags = {"max_steps": 6, "save_steps": 2, "save_total_limit": 9}
    assert classify(ctx_checkpoint, tmp_path, name="whole", **flags) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    (tmp_path / "stopped" / "model.safetensors").unlink()
    for step in (4, 6):  # as if killed after step 3
        shutil.rmtree(tmp_path / "stopped" / f"checkpoint-{step}")
    assert classify(ctx_checkpoint, tmp_path, "--resume", name="stopped", **flags) == 0
    uninterrupted, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert uninterrupted == resumed


def test_resume_requires_same_data_and_config(ctx_checkpoint, tmp_path, capsys):
    """Files may be moved, but not changed."""
    options = {"train_examples": 50, "config_options": "hidden_dropout_prob=0.25"}
    assert classify(ctx_checkpoint, tmp_path, **options) == 0
    assert "50 training and" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_dropout_prob"] == 0.25
    (tmp_path / "moved").mkdir()
    moved_files: dict[str, Any] = {"train_file": "train.tsv", "validation_file": "dev.tsv"}
    for flag, name in moved_files.items():
        moved_files[flag] = (tmp_path / name).rename(tmp_path / "moved" / name)
    predictions = {"predictions_file": tmp_path / "predictions"}
    assert classify(ctx_checkpoint, tmp_path, "--resume", **options, **moved_files, **predictions) == 0
    options["config_options"] = "hidden_dropout_prob=0.5"
    assert classify(ctx_checkpoint, tmp_path, "--resume", **options, **moved_files) == 2
    assert "config.hidden_dropout_prob is 0.5, was" in capsys.readouterr().err
    options["config_options"] = "hidden_dropout_prob=0.25"
    moved_files["train_file"].write_text(moved_files["train_file"].read_text().replace(GOOD[0], GOOD[1]))
    assert classify(ctx_checkpoint, tmp_path, "--resume", **options, **moved_files) == 2
    assert "train_file is" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["tokenizer", "weights", "config.json"])
def test_damaged_checkpoint_raises(damage, ctx_checkpoint, tmp_path, capsys):
    model = shutil.copytree(ctx_checkpoint, tmp_path / "model")
    if damage == "tokenizer":
        (model / "tokenizer.json").unlink()
    elif damage == "weights":
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    assert classify(model, tmp_path) == 2
    error = capsys.readouterr().err
    message = error[error.rindex("CtxError") :]
    assert all(text in message for text in (damage, str(model), "Fix:"))
    assert len(message.splitlines()) < 25
    assert not (tmp_path / "out" / "model.safetensors").exists()


def check_two_processes(task: str, tmp_path: Path, *metric_names: str, batch_size: int, **flags: Any) -> None:
    """Check that two processes log the same values as one; `flags` exclude batch size and output_dir."""
    logs = {}
    for processes, run in ((1, run_command), (2, run_in_two_processes)):
        sizes = {"per_device_batch_size": batch_size // processes, "output_dir": tmp_path / f"out{processes}"}
        assert not run("finetune", task, **flags, **sizes, predictions_file=tmp_path / f"{processes}.jsonl")
        logs[processes] = read_log(sizes["output_dir"])
    for one, two in zip(logs[1], logs[2], strict=True):
        for name in metric_names:
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5)
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "2.jsonl").read_text()


def test_two_processes_match_one(ctx_checkpoint, tmp_path):
    flags = {"max_length": 24, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "batch_size": 16}
    names = ("loss", "grad_norm", "eval_loss", "eval_f1")
    task = "token-classification"
    check_two_processes(task, tmp_path, *names, model=ctx_checkpoint, **tagging_files(tmp_path), **flags)
    assert TrainingSummary.load(tmp_path / "out2").global_batch_size == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze",
    ["gradual:steps=2", "chain:head_rate=0.01,rate=0.003", "three-stage:layers_epoch=0.5,embeddings_epoch=1"],
)
def test_unfreezing_in_two_processes_matches_one(ctx_checkpoint, tmp_path, freeze):
    """Gradients of layers that are unfrozen during training are synchronized between processes."""
    flags = {"max_length": 24, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": 1e-3, "batch_size": 16}
    names = ("loss", "grad_norm", "eval_loss", "eval_f1")
    files = tagging_files(tmp_path)
    check_two_processes("token-classification", tmp_path, *names, model=ctx_checkpoint, freeze=freeze, **files, **flags)
    one, two = (load_file(tmp_path / f"out{processes}" / "model.safetensors") for processes in (1, 2))
    initial = load_file(Path(ctx_checkpoint) / "model.safetensors")
    encoder = {name.partition(".")[2]: weight for name, weight in one.items()}
    assert any(not torch.equal(weight, encoder[name]) for name, weight in initial.items() if name in encoder)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-4)
