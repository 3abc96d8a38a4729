"""`hf-ctxmodels finetune multitask` and `ranking`: training, saving, resuming, several processes, invalid flags."""

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from commands import run_command, run_in_two_processes
from labeled_texts import (
    BAD,
    GOOD,
    choice_files,
    classification_files,
    pair_files,
    save_tiny,
    tagging_files,
    write_splits,
)
from safetensors.torch import load_file
from test_finetune import finetune
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    SqueezeBertConfig,
    SqueezeBertForMultipleChoice,
)

from hf_ctxmodels import FAMILIES, CtxError, CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.compression.distillation import Teacher
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config
from hf_ctxmodels.downstream.adapters import get_active_adapters, load_saved_adapters
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_with_adapters
from hf_ctxmodels.downstream.finetuning import finetuning_run
from hf_ctxmodels.downstream.multitask.configuration import task_entry
from hf_ctxmodels.downstream.multitask.task_list import read_task_list
from hf_ctxmodels.downstream.multitask.training import BestModel
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.inference.prediction import Predictor, finetuning_summary
from hf_ctxmodels.training.pretraining import PretrainingArguments, resolve_family
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

TASK_FILES = {
    "sentences": ("sequence-classification", classification_files),
    "pairs": ("sequence-classification", pair_files),
    "words": ("token-classification", tagging_files),
    "choices": ("multiple-choice", choice_files),
}
ROOT = Path(__file__).parents[2]
EXACT = ["hidden_dropout_prob=0", "attention_probs_dropout_prob=0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["bert"], from_transformers=False)


def make_tasks(folder: Path, **options: dict[str, object]) -> dict[str, dict[str, object]]:
    """Task list entries, each with its options and with files in a subfolder."""
    tasks = {}
    for name in options:
        task_kind, make_files = TASK_FILES[name]
        (folder / name).mkdir(parents=True)
        entry = {flag: value for flag, value in make_files(folder / name).items() if flag != "both_orders"}
        for file in ("train_file", "validation_file"):
            entry[file] = str(entry[file].relative_to(folder))
        tasks[name] = {"kind": task_kind, **entry, **options[name]}
    return tasks


def multitask(model: object, folder: Path, tasks: dict[str, dict[str, object]], **flags: Any) -> dict[str, Any]:
    """Write the task list; returns the flags that train on it."""
    settings = {"sampling": flags.pop("sampling")} if "sampling" in flags else {}
    (folder / "tasks.yaml").write_text(yaml.safe_dump({**settings, "tasks": tasks}, sort_keys=False))
    files = {"model": model, "tasks": folder / "tasks.yaml", "tasks_folder": folder, "max_length": 24}
    return files | flags


def ranking_files(directory: Path) -> dict[str, Any]:
    """Two to four candidates for each query, at least one of them relevant."""

    def make_table(generator: random.Random, size: int) -> str:
        rows = ["query,candidate,label"]
        for number in range(size):
            labels = [1, 0, *generator.choices((0, 0, 0, 1), k=generator.randrange(3))]
            generator.shuffle(labels)
            words = [generator.choice(GOOD if label else BAD) for label in labels]
            rows += [f"{number} was the film,{word},{label}" for word, label in zip(words, labels, strict=True)]
        return "\n".join(rows)

    return write_splits(directory, "csv", make_table)


def test_ranking_and_multitask_ranking(checkpoint, tmp_path, monkeypatch, capsys):
    """Relevant candidates are ranked first, also in multitask training; a head of transformers is rejected."""
    predictions_file = tmp_path / "predictions.jsonl"
    flags = {**ranking_files(tmp_path), "max_length": 16, "save_steps": 0, "per_device_batch_size": 8}
    flags |= {"max_steps": 60, "learning_rate": "3e-3", "predictions_file": predictions_file}
    assert finetune("ranking", model=checkpoint, output_dir=tmp_path / "out", **flags) == 0
    metrics = TrainingSummary.load(tmp_path / "out").metrics
    assert metrics["eval_mrr"] > 0.9 > metrics["baseline_mrr"]
    rows = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    is_relevant = [row["relevant"][max(range(len(row["scores"])), key=row["scores"].__getitem__)] for row in rows]
    assert sum(is_relevant) / len(is_relevant) == metrics["eval_accuracy_at_1"]
    monkeypatch.setitem(TASK_FILES, "ranked", ("ranking", ranking_files))
    tasks = make_tasks(tmp_path / "list", ranked={}, sentences={})
    length = {"max_length": 16, "max_steps": 2, "save_steps": 0, "output_dir": tmp_path / "together"}
    assert finetune("multitask", **multitask(checkpoint, tmp_path / "list", tasks, **length)) == 0
    assert 0 < TrainingSummary.load(tmp_path / "together").metrics["eval_ranked_mrr"] <= 1
    reference = save_tiny(tmp_path / "reference", FAMILIES["bert"], from_transformers=False)
    sizes = {"hidden_size": 32, "embedding_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = SqueezeBertConfig(vocab_size=300, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    SqueezeBertForMultipleChoice(config).save_pretrained(reference)  # a model of no family
    capsys.readouterr()
    assert finetune("ranking", "--overwrite", model=reference, output_dir=tmp_path / "no", **flags) == 2
    assert "SqueezeBertForMultipleChoice does not take choice_mask" in capsys.readouterr().err


def test_tasks_of_unfinished_runs_and_models_on_the_hub(checkpoint, tmp_path, monkeypatch):
    """The head of ranking is a head for multiple choice; the task and the length are saved by the run."""
    flags = {"max_length": 16, "max_steps": 2, "save_steps": 1}
    out, together = tmp_path / "out", tmp_path / "together"
    files = ranking_files(tmp_path) | {"text_columns": "query,candidate"}
    assert finetune("ranking", model=checkpoint, output_dir=out, **files, **flags) == 0
    monkeypatch.setitem(TASK_FILES, "ranked", ("ranking", ranking_files))
    tasks = make_tasks(tmp_path / "list", ranked={}, sentences={"max_length": 20})
    assert finetune("multitask", **multitask(checkpoint, tmp_path / "list", tasks, **flags), output_dir=together) == 0
    lengths = {"ranked": 16, "sentences": 20}
    assert {
        name: predictor.task.arguments.max_length for name, predictor in Predictor.open_tasks(str(together))
    } == lengths

    snapshots = tmp_path / "cache" / "models--zoo--ranker" / "snapshots"
    shutil.copytree(out, snapshots / "0123", ignore=shutil.ignore_patterns("checkpoint-*"))
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for folder in (out, together):
        (folder / "training_summary.json").unlink()
    for source, task_name in (
        ("zoo/ranker", None),
        (out / "checkpoint-1", None),
        (together / "checkpoint-1", "ranked"),  # of two tasks with different lengths
    ):
        predictor = Predictor.open(str(source), task_name=task_name)
        assert (predictor.task.name, predictor.task.arguments.max_length) == ("ranking", 16), source
    unfinished = finetuning_summary(out / "checkpoint-1")
    assert (unfinished.dataset, unfinished.steps, unfinished.global_batch_size) == ("train.csv", 1, 32)
    assert unfinished.columns == {"text_columns": "query,candidate"}
    assert finetuning_summary(checkpoint) is None


@pytest.mark.slow
def test_multitask_training_saving_and_publishing(checkpoint, tmp_path, capsys):
    """Tasks are trained jointly, saved and published; the model of one task is fine-tuned further."""
    options = {"sentences": {"head_dropout": 0.05, "metric": "f1_macro"}, "words": {}, "choices": {}}
    tasks = make_tasks(tmp_path, **options, pairs={"answer_steps": 2, "weight": 0.5})
    out = tmp_path / "out"
    flags = {"learning_rate": "5e-3", "max_steps": 240, "per_device_batch_size": 16, "eval_steps": 80, "keep": "best"}
    assert finetune("multitask", **multitask(checkpoint, tmp_path, tasks, **flags, output_dir=out)) == 0
    printed = capsys.readouterr().out
    metrics = TrainingSummary.load(out).metrics
    assert min(metrics[f"eval_{name}"] for name in ("sentences_accuracy", "words_f1", "choices_accuracy")) > 0.9
    names = ("sentences_f1_macro", "pairs_accuracy", "words_f1", "choices_accuracy")
    main_metrics = [metrics[f"eval_{name}"] for name in names]
    assert metrics["eval_mean"] == pytest.approx(sum(main_metrics) / 4)
    best = max(row["eval_mean"] for row in read_log(out) if "eval_mean" in row)
    assert metrics["eval_mean"] == best
    baseline = metrics["baseline_sentences_f1_macro"]
    assert baseline < metrics["baseline_sentences_f1_macro_tfidf"] <= 1
    assert f"sentences       f1_macro{main_metrics[0]:>26.4f}{baseline:>10.4f}" in printed
    assert f"mean            main metrics{metrics['eval_mean']:>22.4f}{metrics['baseline_mean']:>10.4f}" in printed

    model = AutoModel.from_pretrained(out)
    assert type(model) is CtxMultiTaskModel
    assert model.config.task_config("sentences").head_dropout == 0.05
    assert list(model.config.task_config("words").id2label.values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    model.task("pairs").save_pretrained(tmp_path / "pairs-alone")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "pairs-alone").config.answer_steps == 2

    assert run_command("push", model=out, repo_id="a/b", output_dir=tmp_path / "hub") == 0
    assert 'model.task("choices")' in (tmp_path / "hub" / "README.md").read_text()
    assert type(AutoModel.from_pretrained(tmp_path / "hub")) is CtxMultiTaskModel
    assert AutoTokenizer.from_pretrained(tmp_path / "hub")("the film").input_ids

    further = {"task_name": "words", **tagging_files(tmp_path), "max_length": 24, "max_steps": 1}
    further |= {"learning_rate": "1e-9", "output_dir": tmp_path / "again"}
    assert finetune("token-classification", model=out, **further) == 0
    assert TrainingSummary.load(tmp_path / "again").metrics["eval_f1"] == metrics["eval_words_f1"]
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "again").config.model_type == "ctx-bert"


def test_task_adapters_and_projected_attention(checkpoint, tmp_path, capsys):
    """Task adapters are trained in the frozen encoder, the best ones are saved, and they can be fused; projected
    attention is saved in the model."""
    tasks = make_tasks(tmp_path, sentences={}, words={})
    flags = {"learning_rate": "1e-2", "max_steps": 6, "eval_steps": 3, "keep": "best", "output_dir": tmp_path / "out"}
    adapter_flags = multitask(checkpoint, tmp_path, tasks, **flags, adapter="pfeiffer:reduction_factor=4")
    assert finetune("multitask", **adapter_flags) == 0
    assert {path.name for path in (tmp_path / "out" / "adapters").iterdir()} == {
        *("shared", "sentences", "words"),
        "stack.json",
    }
    model, pretrained = AutoModel.from_pretrained(tmp_path / "out"), AutoModel.from_pretrained(checkpoint)
    for name, value in pretrained.state_dict().items():
        assert "pooler" in name or torch.equal(model.encoder.state_dict()[name], value), name
    load_saved_adapters(model, tmp_path / "out")
    ups = [model.encoder.layers[0].adapters["feed_forward"].members[name].adapter_up for name in ("shared", "words")]
    assert all(up.bias.any() for up in ups)
    assert model.config.task_adapters == {"sentences": ["shared", "sentences"], "words": ["shared", "words"]}

    fused = ",".join(str(tmp_path / "out" / "adapters" / name) for name in ("sentences", "words"))
    files = classification_files(tmp_path) | {"max_length": 24, "max_steps": 2}
    fusion = {"model": checkpoint, "output_dir": tmp_path / "fused", "adapter": f"fusion:adapters={fused}"}
    assert finetune("sequence-classification", **files, **fusion) == 0
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "fused")
    assert sorted(load_saved_adapters(classifier, tmp_path / "fused")) == ["sentences", "words"]
    assert get_active_adapters(classifier) == (("sentences", "words"),)
    capsys.readouterr()
    invalid = fusion | {"adapter": f"fusion:adapters={fused.split(',')[0]}", "output_dir": tmp_path / "one"}
    assert finetune("sequence-classification", **files, **invalid) == 2
    assert "two or more adapters" in capsys.readouterr().err

    flags = {"max_steps": 2, "output_dir": tmp_path / "pals"}
    attention = "projected-attention:size=8,heads=2,train_encoder=false"
    assert finetune("multitask", **multitask(checkpoint, tmp_path, tasks, **flags, adapter=attention)) == 0
    model, loading_info = AutoModel.from_pretrained(tmp_path / "pals", output_loading_info=True)
    assert not any(loading_info.values())
    assert set(model.task_attention.members) == {"sentences", "words"}
    embeddings = model.encoder.get_input_embeddings().weight
    assert torch.equal(embeddings, pretrained.get_input_embeddings().weight)


def test_resumed_run_equals_uninterrupted_run(checkpoint, tmp_path, capsys):
    tasks = make_tasks(tmp_path, pairs={"answer_steps": 2}, words={})
    flags = {"num_train_epochs": 1, "save_steps": 2, "eval_steps": 1, "save_total_limit": 9}
    flags |= {"keep": "best", "learning_rate": "1e-3"}

    def run(name: str, *args: str, sampling: str = "annealed") -> int:
        out = tmp_path / name
        command = multitask(checkpoint, tmp_path, tasks, **flags, output_dir=out, sampling=sampling)
        return finetune("multitask", *args, **command)

    assert run("whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (4, 6):  # as if killed after step 3
        shutil.rmtree(tmp_path / "stopped" / f"checkpoint-{step}")
    assert run("stopped", "--resume") == 0
    for name in ("model.safetensors", "best.safetensors", "checkpoint-6/model.safetensors"):
        uninterrupted, resumed = ((tmp_path / run_name / name).read_bytes() for run_name in ("whole", "stopped"))
        assert uninterrupted == resumed, name
    for sampling, weight in (("proportional", 1.0), ("annealed", 2.0)):
        tasks["words"]["weight"] = weight
        assert run("stopped", "--resume", sampling=sampling) == 2
        assert "belongs to another run" in capsys.readouterr().err


def test_best_model_is_kept(tmp_path):
    """The model with the highest mean metric is kept until a new run starts."""
    accelerator = SimpleNamespace(
        unwrap_model=lambda model, **options: model, is_main_process=True, wait_for_everyone=list
    )
    model, best = torch.nn.Linear(1, 1, bias=False), BestModel(tmp_path, resume=False)

    def update(mean: float, weight: float) -> float:
        torch.nn.init.constant_(model.weight, weight)
        best.update({"eval_mean": mean}, model, accelerator)
        return load_file(best.file)["weight"].item()

    assert [update(*values) for values in ((0.2, 1.0), (0.5, 2.0), (0.4, 3.0), (0.5, 4.0))] == [1.0, 2.0, 2.0, 2.0]
    assert BestModel(tmp_path, resume=True).metrics == {}, "nothing is resumed without a checkpoint"
    (tmp_path / "checkpoint-2").mkdir()
    assert BestModel(tmp_path, resume=True).metrics == {"eval_mean": 0.5}
    best = BestModel(tmp_path, resume=False)
    assert update(0.1, 5.0) == 5.0


@pytest.mark.slow
def test_accumulation_and_processes_match_one_batch(tmp_path):
    model = save_tiny(tmp_path / "reference", FAMILIES["bert"], from_transformers=True)  # a class of transformers
    tasks = make_tasks(tmp_path, sentences={}, words={"weight": 0.5})
    flags = multitask(model, tmp_path, tasks, config_options=EXACT, max_steps=6, logging_steps=1, learning_rate=1e-3)
    for name, size, micro_batches in (("whole", 16, 1), ("accumulated", 4, 4)):
        sizes = {"per_device_batch_size": size, "gradient_accumulation_steps": micro_batches}
        assert finetune("multitask", **flags, **sizes, output_dir=tmp_path / name) == 0
    run_in_two_processes("finetune", "multitask", **flags, per_device_batch_size=8, output_dir=tmp_path / "divided")
    expected = read_log(tmp_path / "whole")
    assert {name for row in expected for name in row} >= {"sentences_loss", "words_loss", "eval_words_f1", "eval_mean"}
    for name in ("accumulated", "divided"):
        for expected_row, actual in zip(expected, read_log(tmp_path / name), strict=True):
            for key in expected_row.keys() - {"tokens_per_second", "run_tokens_per_second"}:
                assert actual[key] == pytest.approx(expected_row[key], abs=1e-5), (name, key)
    assert AutoModel.from_pretrained(tmp_path / "divided").config.encoder.model_type == "ctx-bert"


def test_invalid_task_lists_and_flags(checkpoint, tmp_path, capsys, subtests):
    valid_tasks, list_file = make_tasks(tmp_path, sentences={}, words={}), tmp_path / "tasks.yaml"
    out = tmp_path / "out"

    def assert_fails(*messages: str, modify: Any = None, model: object = checkpoint, **flags: Any) -> None:
        with subtests.test(messages[0]):
            tasks = json.loads(json.dumps(valid_tasks))
            if modify is not None:
                modify(tasks)
            command = multitask(model, tmp_path, tasks, output_dir=out, **{"max_steps": 1, **flags})
            assert finetune("multitask", **command) == 2
            error = capsys.readouterr().err
            assert "Traceback" not in error
            assert all(message in error for message in messages), error

    location = f"{list_file}:2, task sentences"
    for options, message in (
        ({"label_column": "judgment"}, "No column 'judgment'"),
        ({"metric": "bleu"}, "has no metric 'bleu'"),
    ):
        assert_fails(message, location, modify=lambda tasks, options=options: tasks["sentences"].update(options))
    assert_fails("'values' is not a valid name", modify=lambda tasks: tasks.update(values=tasks.pop("sentences")))
    roberta = save_tiny(tmp_path / "roberta", FAMILIES["roberta"], from_transformers=False)
    pair_options = {"answer_steps": 2}
    assert_fails("compares two segments", location, modify=lambda t: t["sentences"].update(pair_options), model=roberta)
    shutil.copytree(checkpoint, tmp_path / "int8")
    AutoModel.from_pretrained(checkpoint, quantization_config=CtxInt8Config()).save_pretrained(tmp_path / "int8")
    assert_fails("A quantized model cannot be trained", model=tmp_path / "int8")
    assert_fails("--train_file", train_file=tmp_path / "sentences" / "dev.tsv")
    assert_fails("--language", language="de")
    assert_fails("--layerwise_lr_decay 1", freeze="encoder", layerwise_lr_decay=2)
    assert_fails("Unknown flag --task_name", task_name="words")
    assert_fails("needs the length of the run in epochs", sampling="annealed")
    assert_fails("The list has no task word.", only="word")
    assert finetune("regression", model=checkpoint, output_dir=out) == 2
    assert "required: --train_file, --validation_file" in capsys.readouterr().err
    for name, message in (
        ("mtdn", "did you mean mtdnn?"),
        (tmp_path / "none.yaml", "no such task list"),
        (tmp_path / "none.yaml", "path of a YAML file"),
    ):
        assert finetune("multitask", model=checkpoint, output_dir=out, tasks=name) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "sentences" / "dev.tsv").write_text("sentence\tgold\nthe film was great\tneutral\n")
    assert_fails("The task sentences: The label 'neutral'", "dev.tsv:2")
    command = multitask(checkpoint, tmp_path, valid_tasks, max_steps=1, only="words", output_dir=tmp_path / "alone")
    assert finetune("multitask", **command) == 0
    assert list(AutoModel.from_pretrained(tmp_path / "alone").config.tasks) == ["words"]


def test_multitask_model_raises_where_one_task_is_needed(checkpoint, tmp_path):
    folder, encoder = tmp_path / "model", AutoConfig.from_pretrained(checkpoint)
    entry = task_entry("AutoModelForSequenceClassification", encoder)
    CtxMultiTaskModel(CtxMultiTaskConfig(encoder=encoder, tasks={"rte": entry})).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    for load in (
        lambda: Teacher.open(str(folder)),
        lambda: resolve_family(PretrainingArguments(model=str(folder), dataset=["demo"])),
        lambda: load_model_with_adapters(folder, "AutoModelForSequenceClassification", config),
    ):
        with pytest.raises(CtxError, match=r'model.task\("rte"\).save_pretrained'):
            load()
    assert type(load_model_with_adapters(folder, "AutoModel", config)) is CtxMultiTaskModel


def test_packaged_task_list(shared_data):
    tasks = read_task_list(ROOT / "scripts" / "tasks" / "mtdnn.yaml", TaskArguments(), shared_data).tasks
    readers = {task.name: TASKS[task.kind](task.arguments).read for task in tasks}
    sizes = {task.name: len(readers[task.name](task.train_file, "train")) for task in tasks}
    expected = {"sst2": 6920, "cola": 8551, "mrpc": 4076, "rte": 2490, "sick": 4500, "stsb": 5749, "ner": 14041}
    assert sizes == {**expected, "sick-relatedness": 4500}
    assert all(len(readers[task.name](task.validation_file, "validation")) > 200 for task in tasks)


@pytest.fixture(scope="module")
def cross_view_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("cvt"), FAMILIES["cvt"], from_transformers=False)


@pytest.mark.slow
def test_multitask_cross_view_training(cross_view_model, tmp_path, monkeypatch, capsys):
    """Cross-view training alternates labeled and unlabeled steps; `predict --all_tasks` loads the model once."""
    tasks = make_tasks(tmp_path, words={}, sentences={})
    (tmp_path / "more").mkdir()
    unlabeled = tagging_files(tmp_path / "more")["train_file"]
    flags = multitask(cross_view_model, tmp_path, tasks, learning_rate=1e-2, logging_steps=1, seed=0)
    flags |= {"unlabeled_file": unlabeled, "per_device_batch_size": 8, "max_steps": 60}
    flags |= {"config_options": "word_dropout=0.5"}  # the family's default; the tiny model has none
    assert finetune("multitask", **flags, output_dir=tmp_path / "out") == 0
    assert "96 unlabeled examples" in capsys.readouterr().err
    log = [row for row in read_log(tmp_path / "out") if "loss" in row]
    is_unlabeled = ["cross_view_loss" in row for row in log]
    assert is_unlabeled == [False, True] * 30
    assert {"words_loss", "sentences_loss"} <= {name for row in log for name in row}
    assert all(math.isfinite(row["loss"]) for row in log)
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert {type(head).__name__ for head in model.heads.values()} == {
        "CtxCvtForTokenClassification",
        "CtxCvtForSequenceClassification",
    }
    metrics = TrainingSummary.load(tmp_path / "out").metrics
    assert metrics["eval_words_f1"] > 0.9  # classifying sentences takes more steps

    text_file, output = tmp_path / "text.jsonl", tmp_path / "labels.jsonl"
    text_file.write_text(
        "".join(json.dumps({"tokens": words, "text": " ".join(words)}) + "\n" for words in (["the", "film"], ["a"]))
    )
    flags = {"model": tmp_path / "out", "input": text_file}
    load = Mock(wraps=finetuning_run.load_pretrained)
    monkeypatch.setattr(finetuning_run, "load_pretrained", load)
    assert run_command("predict", "--all_tasks", **flags, output=output) == 0
    assert load.call_count == 1
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for name in ("words", "sentences"):
        assert run_command("predict", "--overwrite", **flags, task_name=name, output=tmp_path / "one.jsonl") == 0
        single_task = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
        assert [row[name] for row in rows] == single_task
    assert run_command("predict", "--all_tasks", model=cross_view_model, input=text_file) == 2
    assert "not trained on several tasks" in capsys.readouterr().err


def test_cross_view_loss_trains_all_heads(cross_view_model):
    """The loss of an unlabeled batch is the sum of the losses of the heads, weighted in training mode."""
    config = AutoConfig.from_pretrained(cross_view_model)
    config.num_labels = 3
    task_entries = {
        "tags": task_entry("AutoModelForTokenClassification", config, 0.5),
        "topics": task_entry("AutoModelForSequenceClassification", config),
    }
    torch.manual_seed(0)
    model = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=config, tasks=task_entries)).eval()
    batch = AutoTokenizer.from_pretrained(cross_view_model)(
        ["the film", "a lovely great film"], padding=True, return_tensors="pt"
    )
    views = torch.where(batch.attention_mask == 1, 1, -100)
    views[0] = -100
    text_views = torch.tensor([-100, 1])
    losses = [
        model.task(name)(**batch, views=targets).loss for name, targets in (("tags", views), ("topics", text_views))
    ]
    assert min(losses) > 0
    assert float(model(**batch, views=views).loss) == pytest.approx(float(sum(losses)), rel=1e-5)
    output = model(**batch, views=text_views)
    assert float(output.loss) == pytest.approx(float(losses[1]), rel=1e-5)
    model.train()
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(config)):
            module.config.view_dropout = 0.0
    expected = 0.5 * losses[0] + losses[1]
    output = model(**batch, views=views)
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(output.cross_view_loss) == pytest.approx(float(sum(losses)), rel=1e-5)
    output.loss.backward()
    for name in ("tags", "topics"):
        assert any(weight.grad is not None and weight.grad.any() for weight in model.heads[name].parameters())
    bert = CtxMultiTaskModel(CtxMultiTaskConfig())
    with pytest.raises(CtxError, match="No task learns"):
        bert(input_ids=torch.tensor([[5]]), views=torch.tensor([[1]]))


def test_unlabeled_file_without_unlabeled_loss_raises(checkpoint, tmp_path, capsys):
    tasks = make_tasks(tmp_path, sentences={})
    flags = multitask(checkpoint, tmp_path, tasks, unlabeled_file=tmp_path / "more.tsv", max_steps=1)
    assert finetune("multitask", **flags, output_dir=tmp_path / "out") == 2
    assert "No task of the list has a loss for unlabeled examples" in capsys.readouterr().err
