"""`finetune --tasks` as a user runs it: what is learned and saved, resuming, accumulation, two processes, errors."""

import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from forked import run_forked
from test_finetune import (
    BAD,
    GOOD,
    ROOT,
    TWO_PROCESSES,
    choice_files,
    classification_files,
    finetune,
    pair_files,
    save_tiny,
    tagging_files,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from hf_ctxmodels import FAMILIES, CtxError, CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.cli import push
from hf_ctxmodels.compression.distillation import Teacher
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config
from hf_ctxmodels.downstream.finetuning.multitask.evaluation import BestModel
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.downstream.multitask.configuration import task_entry
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.tasks.task_list import read_task_list
from hf_ctxmodels.training.pretraining import PretrainingArguments, resolve_family
from hf_ctxmodels.training.summary import TrainingSummary

MAKERS = {
    "sentences": ("sequence-classification", classification_files),
    "pairs": ("sequence-classification", pair_files),
    "words": ("token-classification", tagging_files),
    "choices": ("multiple-choice", choice_files),
}
EXACT = ["--config_options", "hidden_dropout_prob=0", "attention_probs_dropout_prob=0", "--max_length", "24"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["bert"], upstream=False)


def listed(folder: Path, **options: dict[str, object]) -> dict[str, dict[str, object]]:
    """Tasks with files of their own, and options of some of them."""
    tasks = {}
    for name in options:
        kind, make = MAKERS[name]
        (folder / name).mkdir(parents=True)
        flags = make(folder / name)
        given = dict(zip((flag.removeprefix("--") for flag in flags[::2]), flags[1::2], strict=True))
        given.pop("both_orders", None)
        for file in ("train_file", "validation_file"):
            given[file] = str(Path(given[file]).relative_to(folder))
        tasks[name] = {"kind": kind, **given, **options[name]}
    return tasks


def written(folder: Path, tasks: dict[str, dict[str, object]], **top: object) -> list[str]:
    """The flags of a list of these tasks."""
    (folder / "tasks.yaml").write_text(yaml.safe_dump({**top, "tasks": tasks}, sort_keys=False))
    return ["--tasks", str(folder / "tasks.yaml"), "--tasks_folder", str(folder)]


def logged(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]


def ranking_files(directory: Path) -> list[str]:
    """From 2 to 4 candidates, of which one or two are good."""
    generator = random.Random(0)
    for name, size in (("train", 96), ("dev", 32)):
        rows = ["query,candidate,label"]
        for number in range(size):
            labels = [1, 0, *generator.choices((0, 0, 0, 1), k=generator.randrange(3))]
            generator.shuffle(labels)
            words = [generator.choice(GOOD if label else BAD) for label in labels]
            pairs = zip(words, labels, strict=True)
            rows += [f"{number} was the film,{word},{label}" for word, label in pairs]
        (directory / f"{name}.csv").write_text("\n".join(rows))
    return ["--train_file", str(directory / "train.csv"), "--validation_file", str(directory / "dev.csv")]


def test_candidates_are_ranked_alone_and_in_a_list(checkpoint, tmp_path, monkeypatch, capsys):
    """The relevant ones come first, and a list of tasks has the kind; a head of transformers is refused."""
    files, predicted = ranking_files(tmp_path), tmp_path / "predictions.jsonl"
    flags = ["ranking", *files, "--max_length", 16, "--save_steps", 0, "--per_device_batch_size", 8]
    flags += ["--max_steps", 60, "--learning_rate", "3e-3", "--predictions_file", predicted]
    assert finetune(monkeypatch, *flags, "--model", checkpoint, "--output_dir", tmp_path / "out") == 0
    metrics = TrainingSummary.load(tmp_path / "out").metrics
    assert metrics["eval_mrr"] > 0.9 > metrics["baseline_mrr"]
    rows = [json.loads(line) for line in predicted.read_text().splitlines()]
    first = [row["relevant"][max(range(len(row["scores"])), key=row["scores"].__getitem__)] for row in rows]
    assert sum(first) / len(first) == metrics["eval_accuracy_at_1"]
    monkeypatch.setitem(MAKERS, "ranked", ("ranking", ranking_files))
    both = written(tmp_path / "list", listed(tmp_path / "list", ranked={}, sentences={}))
    more = ["--max_length", 16, "--max_steps", 2, "--save_steps", 0, "--output_dir", tmp_path / "together"]
    assert finetune(monkeypatch, "multitask", "--model", checkpoint, *both, *more) == 0
    assert 0 < TrainingSummary.load(tmp_path / "together").metrics["eval_ranked_mrr"] <= 1
    peer = save_tiny(tmp_path / "peer", FAMILIES["bert"], upstream=True)
    capsys.readouterr()
    assert finetune(monkeypatch, *flags, "--model", peer, "--overwrite", "--output_dir", tmp_path / "no") == 2
    assert "BertForMultipleChoice does not take choice_mask" in capsys.readouterr().err


def test_tasks_are_learned_together_saved_published_and_tuned_again(checkpoint, tmp_path, monkeypatch, capsys):
    tasks = listed(
        tmp_path,
        sentences={"head_dropout": 0.05, "metric": "f1_macro"},
        pairs={"answer_steps": 2, "weight": 0.5},
        words={},
        choices={},
    )
    out = tmp_path / "out"
    flags = [
        "multitask",
        "--model",
        checkpoint,
        *written(tmp_path, tasks),
        "--max_length",
        "24",
        "--learning_rate",
        "5e-3",
    ]
    flags += ["--max_steps", 240, "--per_device_batch_size", 16, "--eval_steps", 80, "--keep", "best"]
    assert finetune(monkeypatch, *flags, "--output_dir", out) == 0
    shown = capsys.readouterr().out
    found = TrainingSummary.load(out).metrics
    assert found["eval_sentences_accuracy"] > 0.9
    assert found["eval_words_f1"] > 0.9
    assert found["eval_choices_accuracy"] > 0.9
    main = [found[f"eval_{name}"] for name in ("sentences_f1_macro", "pairs_accuracy", "words_f1", "choices_accuracy")]
    assert found["eval_mean"] == pytest.approx(sum(main) / 4)
    assert found["eval_mean"] == max(row["eval_mean"] for row in logged(out) if "eval_mean" in row), "the best is kept"
    assert f"sentences       f1_macro{main[0]:>26.4f}{found['baseline_sentences_f1_macro']:>10.4f}" in shown
    assert f"mean            main metrics{found['eval_mean']:>22.4f}{found['baseline_mean']:>10.4f}" in shown

    model = AutoModel.from_pretrained(out)
    assert type(model) is CtxMultiTaskModel
    assert model.config.task_config("sentences").head_dropout == 0.05
    assert list(model.config.task_config("words").id2label.values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    model.task("pairs").save_pretrained(tmp_path / "pairs-alone")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "pairs-alone").config.answer_steps == 2

    monkeypatch.setattr(
        sys, "argv", ["push", "--model", str(out), "--repo_id", "a/b", "--output_dir", str(tmp_path / "hub")]
    )
    push.main()
    assert 'model.task("choices")' in (tmp_path / "hub" / "README.md").read_text()
    assert type(AutoModel.from_pretrained(tmp_path / "hub")) is CtxMultiTaskModel
    assert AutoTokenizer.from_pretrained(tmp_path / "hub")("the film").input_ids

    again = ["token-classification", "--model", out, "--task_name", "words", *tagging_files(tmp_path)]
    again += [
        "--max_length",
        "24",
        "--max_steps",
        "1",
        "--learning_rate",
        "1e-9",
        "--output_dir",
        tmp_path / "words-again",
    ]
    assert finetune(monkeypatch, *again) == 0
    assert TrainingSummary.load(tmp_path / "words-again").metrics["eval_f1"] == found["eval_words_f1"]
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "words-again").config.model_type == "ctx-bert"


def test_resuming_gives_the_weights_of_an_uninterrupted_run(checkpoint, tmp_path, monkeypatch, capsys):
    tasks = listed(tmp_path, pairs={"answer_steps": 2}, words={})
    flags = ["multitask", "--model", checkpoint, *written(tmp_path, tasks, sampling="annealed"), "--max_length", "24"]
    flags += ["--num_train_epochs", "1", "--save_steps", "2", "--eval_steps", "1", "--save_total_limit", "9"]
    flags += ["--keep", "best", "--learning_rate", "1e-3"]
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "whole") == 0
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "stopped") == 0
    for step in (4, 6):  # as if the run had been killed after step 3
        (tmp_path / "stopped" / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "stopped", "--resume") == 0
    for name in ("model.safetensors", "best.safetensors", "checkpoint-6/model.safetensors"):
        whole, resumed = ((tmp_path / run / name).read_bytes() for run in ("whole", "stopped"))
        assert whole == resumed, name
    for sampling, weight in (("proportional", 1.0), ("annealed", 2.0)):
        tasks["words"]["weight"] = weight
        written(tmp_path, tasks, sampling=sampling)
        assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "stopped", "--resume") == 2
        assert "belongs to another run" in capsys.readouterr().err


def test_the_model_of_the_highest_mean_is_kept_until_a_new_run(tmp_path):
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=True, wait_for_everyone=list)
    model, best = torch.nn.Linear(1, 1, bias=False), BestModel(tmp_path, resume=False)

    def offer(mean: float, weight: float) -> float:
        torch.nn.init.constant_(model.weight, weight)
        best.update({"eval_mean": mean}, model, accelerator)
        return best.weights()["weight"].item()

    assert [offer(*given) for given in ((0.2, 1.0), (0.5, 2.0), (0.4, 3.0), (0.5, 4.0))] == [1.0, 2.0, 2.0, 2.0]
    assert BestModel(tmp_path, resume=True).metrics == {}, "nothing is resumed without a checkpoint"
    (tmp_path / "checkpoint-2").mkdir()
    assert BestModel(tmp_path, resume=True).metrics == {"eval_mean": 0.5}
    best = BestModel(tmp_path, resume=False)
    assert offer(0.1, 5.0) == 5.0


def test_four_micro_batches_are_one_batch_and_two_processes_are_one(tmp_path, monkeypatch):
    upstream = save_tiny(tmp_path / "upstream", FAMILIES["bert"], upstream=True)  # of transformers' own class
    tasks = listed(tmp_path, sentences={}, words={"weight": 0.5})
    flags = [
        "multitask",
        "--model",
        upstream,
        *written(tmp_path, tasks),
        *EXACT,
        "--max_steps",
        6,
        "--logging_steps",
        1,
    ]
    flags += ["--learning_rate", 1e-3]
    for name, size, micro_batches in (("whole", 16, 1), ("accumulated", 4, 4)):
        more = ["--per_device_batch_size", size, "--gradient_accumulation_steps", micro_batches]
        assert finetune(monkeypatch, *flags, *more, "--output_dir", tmp_path / name) == 0
    more = ["--per_device_batch_size", 8, "--output_dir", tmp_path / "divided"]
    result = run_forked("-c", TWO_PROCESSES, *flags, *more, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = logged(tmp_path / "whole")
    assert {name for row in expected for name in row} >= {"sentences_loss", "words_loss", "eval_words_f1", "eval_mean"}
    for name in ("accumulated", "divided"):
        for one, other in zip(expected, logged(tmp_path / name), strict=True):
            for key in one.keys() - {"tokens_per_second", "run_tokens_per_second"}:
                assert other[key] == pytest.approx(one[key], abs=1e-5), (name, key)
    assert AutoModel.from_pretrained(tmp_path / "divided").config.encoder.model_type == "ctx-bert"


def test_what_cannot_be_is_one_screen(checkpoint, tmp_path, monkeypatch, capsys, subtests):
    def run(change, flags=(), model=checkpoint):
        tasks = json.loads(json.dumps(right))
        change(tasks)
        out = ["--output_dir", tmp_path / "out", "--max_length", "24", "--max_steps", 1]
        status = finetune(monkeypatch, "multitask", "--model", model, *written(tmp_path, tasks, **top), *out, *flags)
        errors = capsys.readouterr().err
        assert status == 2
        assert "Traceback" not in errors
        return errors

    right, top = listed(tmp_path, sentences={}, words={}), {}
    words = save_tiny(tmp_path / "roberta", FAMILIES["roberta"], upstream=False)
    line = f"{tmp_path / 'tasks.yaml'}:2, task sentences"
    dev = tmp_path / "sentences" / "dev.tsv"
    wrong = {
        "a missing column": (lambda each: each["sentences"].update(label_column="judgement"), "No column 'judgement'"),
        "an unknown metric": (lambda each: each["sentences"].update(metric="bleu"), "has no metric 'bleu'"),
        "a task without a name": (
            lambda each: each.update(values=each.pop("sentences")),
            "'values' is not a valid name",
        ),
    }
    for what, (change, says) in wrong.items():
        with subtests.test(what):
            errors = run(change)
            assert says in errors
            assert line in errors or "values" in errors
    with subtests.test("a family without two segments"):
        errors = run(lambda each: each["sentences"].update(answer_steps=2), model=words)
        assert "compares two segments" in errors
        assert line in errors
    with subtests.test("a quantized model"):
        shutil.copytree(checkpoint, tmp_path / "int8")
        AutoModel.from_pretrained(checkpoint, quantization_config=CtxInt8Config()).save_pretrained(tmp_path / "int8")
        assert "A quantized model cannot be trained" in run(lambda each: None, model=str(tmp_path / "int8"))
    with subtests.test("flags of one task"):
        assert "--train_file" in run(lambda each: None, ["--train_file", dev])
        assert "--language" in run(lambda each: None, ["--language", "de"])
    with subtests.test("a plan for frozen layers"):
        assert "--layerwise_lr_decay 1" in run(lambda each: None, ["--freeze", "encoder", "--layerwise_lr_decay", "2"])
    with subtests.test("a model of several tasks where a plain one is needed"):
        several, encoder = tmp_path / "several", AutoConfig.from_pretrained(checkpoint)
        entry = task_entry("AutoModelForSequenceClassification", encoder)
        CtxMultiTaskModel(CtxMultiTaskConfig(encoder=encoder, tasks={"rte": entry})).save_pretrained(several)
        config = AutoConfig.from_pretrained(several)
        for use in (
            lambda: Teacher.open(str(several)),
            lambda: resolve_family(PretrainingArguments(model=str(several), dataset=["demo"])),
            lambda: load_model_with_adapters(several, "AutoModelForSequenceClassification", config),
        ):
            with pytest.raises(CtxError, match=r'model.task\("rte"\).save_pretrained'):
                use()
        assert type(load_model_with_adapters(several, "AutoModel", config)) is CtxMultiTaskModel
    with subtests.test("a task of a plain model"):
        assert "Unknown arguments: --task_name" in run(lambda each: None, ["--task_name", "words"])
    with subtests.test("no task"):
        assert finetune(monkeypatch, "regression", "--model", checkpoint, "--output_dir", tmp_path / "out") == 2
        assert "required: --train_file, --validation_file" in capsys.readouterr().err
    with subtests.test("no such list"):
        assert (
            finetune(
                monkeypatch, "multitask", "--model", checkpoint, "--output_dir", tmp_path / "out", "--tasks", "mtdn"
            )
            == 2
        )
        assert "did you mean mtdnn?" in capsys.readouterr().err
        flags = [
            "multitask",
            "--model",
            checkpoint,
            "--output_dir",
            tmp_path / "out",
            "--tasks",
            tmp_path / "none.yaml",
        ]
        assert finetune(monkeypatch, *flags) == 2
        error = capsys.readouterr().err
        assert "no such task list" in error
        assert "path of a YAML file" in error
    top["sampling"] = "annealed"
    with subtests.test("annealed by steps"):
        assert "needs the length of the run in epochs" in run(lambda each: None)
    dev.write_text("sentence\tgold\nthe film was great\tneutral\n")
    with subtests.test("a label that is not learned"):
        errors = run(lambda each: None)
        assert "The task sentences: The label 'neutral'" in errors
        assert "dev.tsv:2" in errors
    with subtests.test("one task of the list"):
        flags = [
            "multitask",
            "--model",
            checkpoint,
            *written(tmp_path, right),
            "--max_length",
            "24",
            "--max_steps",
            1,
            "--only",
        ]
        assert finetune(monkeypatch, *flags, "word", "--output_dir", tmp_path / "alone") == 2
        assert "The list has no task word." in capsys.readouterr().err
        assert finetune(monkeypatch, *flags, "words", "--output_dir", tmp_path / "alone") == 0
        assert list(AutoModel.from_pretrained(tmp_path / "alone").config.tasks) == ["words"]


def test_the_list_of_the_package_fits_the_data(shared_data):
    found = read_task_list(ROOT / "scripts" / "tasks" / "mtdnn.yaml", TaskArguments(), shared_data).tasks
    sizes = {task.name: len(task.make().read(task.train_file, "train")) for task in found}
    expected = {"sst2": 6920, "cola": 8551, "mrpc": 4076, "rte": 2490, "sick": 4500, "stsb": 5749, "ner": 14041}
    assert sizes == {**expected, "sick-relatedness": 4500}
    assert all(len(task.make().read(task.validation_file, "validation")) > 200 for task in found)
