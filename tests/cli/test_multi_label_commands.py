"""`finetune multi-label-classification`, `predict`, `export transformers` and pipelines of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command_output
from datasets import ClassLabel, Dataset, Features, List, Value
from labeled_texts import BAD, GOOD, NAMES, PLACES, save_tiny
from sklearn.metrics import f1_score
from transformers import AutoConfig, pipeline

from hf_ctxmodels import CtxMultiTaskConfig
from hf_ctxmodels.inference import Predictor
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

CLASSES = {"negative": BAD, "person": NAMES, "place": PLACES, "positive": GOOD, "unused": []}
ORDER = ["positive", "negative", "unused", "place", "person"]
FEATURES = Features({"text": Value("string"), "labels": List(ClassLabel(names=ORDER))})
QUICK = {"max_steps": 60, "learning_rate": "5e-3", "per_device_batch_size": 16, "max_length": 24}
TASK = "multi-label-classification"


def examples(seed: int, size: int) -> list[tuple[str, list[str]]]:
    """Texts with a word of each of up to three labels."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        labels = [label for label in ORDER if label != "unused" and rng.random() < 0.4]
        words = ["the", *(rng.choice(CLASSES[label]) for label in labels), "film"]
        rows.append((" ".join(words), labels))
    return rows


def write_dataset(folder: Path) -> dict[str, Any]:
    for name, seed, size in (("train", 0, 128), ("validation", 1, 32), ("test", 2, 16)):
        rows = examples(seed, size)
        numbers = [[ORDER.index(label) for label in labels] for _, labels in rows]
        columns = {"text": [text for text, _ in rows], "labels": numbers}
        Dataset.from_dict(columns, FEATURES).to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return {"train_file": folder, "validation_file": folder, "label_column": "labels"}


def printed_scores(output: str) -> dict[str, float]:
    return {line.split()[0]: float(line.split()[1]) for line in output.splitlines() if line[:2] in ("f1", "ac")}


def independent_scores(references: list[list[str]], predictions: list[list[str]]) -> dict[str, float]:
    sides = [np.array([[label in labels for label in ORDER] for labels in side]) for side in (references, predictions)]
    scores = {f"f1_{name}": f1_score(*sides, average=name, zero_division=0) for name in ("micro", "macro")}
    return scores | {"accuracy": float(np.mean([set(a) == set(b) for a, b in zip(references, predictions)]))}


def test_training_prediction_and_export(tmp_path: Path) -> None:
    """The scores agree with scikit-learn, and the probabilities with transformers' pipeline of the exported model."""
    model = save_tiny(tmp_path / "bert", FAMILIES["bert"], from_transformers=False)
    (tmp_path / "data").mkdir()
    data, out, file = write_dataset(tmp_path / "data"), tmp_path / "out", tmp_path / "predictions.jsonl"
    command_output(
        "finetune", TASK, model=model, output_dir=out, predictions_file=file, **data, **QUICK | {"max_steps": 120}
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["label"] for record in records] == [labels for _, labels in examples(1, 32)]
    metrics = TrainingSummary.load(out).metrics
    expected = independent_scores(*([record[name] for record in records] for name in ("label", "prediction")))
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert metrics["eval_f1_micro"] > max(0.9, metrics["baseline_f1_micro"])
    assert metrics["baseline_f1_micro_tfidf"] > metrics["baseline_f1_micro"]
    config = AutoConfig.from_pretrained(out)
    assert [*config.id2label.values()] == ORDER, "not in the order of the classes"

    predictions_file = tmp_path / "test.jsonl"
    printed = command_output("predict", model=out, input=tmp_path / "data", output=predictions_file)
    results = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    test_rows = examples(2, 16)
    assert [result["text"] for result in results] == [text for text, _ in test_rows]
    expected = independent_scores([labels for _, labels in test_rows], [result["labels"] for result in results])
    assert printed_scores(printed) == pytest.approx(expected, abs=1e-4)
    assert any(not labels for _, labels in test_rows)
    for result in results:
        assert result["labels"] == [label for label in ORDER if result["probabilities"][label] > 0.5]

    command_output("export transformers", model=out, output_dir=tmp_path / "exported")
    for folder in (out, tmp_path / "exported"):
        outputs = pipeline("text-classification", str(folder), top_k=None)([text for text, _ in test_rows])
        for result, scores in zip(results, outputs, strict=True):
            assert {score["label"]: score["score"] for score in scores} == pytest.approx(
                result["probabilities"], abs=1e-5
            )


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    """The columns are remembered; a file without labels has no score."""
    model = save_tiny(tmp_path / "bert", FAMILIES["bert"], from_transformers=False)
    names = ["positive", "place"]
    for name, seed in (("train", 0), ("dev", 1)):
        rows = [f"{text},{int('positive' in labels)},{int('place' in labels)}\n" for text, labels in examples(seed, 64)]
        (tmp_path / f"{name}.csv").write_text("comment,positive,place\n" + "".join(rows))
    files = {"train_file": tmp_path / "train.csv", "validation_file": tmp_path / "dev.csv"}
    columns = {"text_columns": "comment", "label_column": "positive,place"}
    out = tmp_path / "out"
    command_output("finetune", TASK, model=model, output_dir=out, **files, **columns, **QUICK | {"max_steps": 20})
    assert Predictor.open(str(out)).task.labels == names
    output = tmp_path / "a.jsonl"
    printed = command_output("predict", model=out, input=tmp_path / "dev.csv", output=output)
    metrics = TrainingSummary.load(out).metrics
    expected = {name: metrics[f"eval_{name}"] for name in ("f1_micro", "f1_macro", "accuracy")}
    assert printed_scores(printed) == pytest.approx(expected, abs=1e-4)
    (tmp_path / "test.csv").write_text("comment,positive,place\nthe film,-1,-1\n")
    (tmp_path / "plain.txt").write_text("the film\n")
    for name in ("test.csv", "plain.txt"):
        printed = command_output("predict", model=out, input=tmp_path / name, output=output, overwrite=True)
        assert not printed_scores(printed)
        assert json.loads(output.read_text())["text"] == "the film"


def test_delimiter_is_saved(tmp_path: Path) -> None:
    """`predict` reads labels with the delimiter of training, also from a checkpoint of an unfinished run."""
    model = save_tiny(tmp_path / "bert", FAMILIES["bert"], from_transformers=False)
    for name, seed in (("train", 0), ("dev", 1)):
        rows = [f"{text}\t{'|'.join(labels)}\n" for text, labels in examples(seed, 32)]
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    files = {"train_file": tmp_path / "train.tsv", "validation_file": tmp_path / "dev.tsv", "label_delimiter": "|"}
    out = tmp_path / "out"
    printed = command_output("finetune", TASK, model=model, output_dir=out, **files, **QUICK | {"max_steps": 1})
    assert "--label_delimiter" not in printed
    metrics = TrainingSummary.load(out).metrics
    expected = {name: metrics[f"eval_{name}"] for name in ("f1_micro", "f1_macro", "accuracy")}
    for model in (out, out / "checkpoint-1"):
        printed = command_output("predict", model=model, input=tmp_path / "dev.tsv", output=tmp_path / "a.jsonl")
        assert printed_scores(printed) == pytest.approx(expected, abs=1e-4)
        (tmp_path / "a.jsonl").unlink()
        (out / "training_summary.json").unlink(missing_ok=True)  # as in an unfinished run


def test_several_tasks(tmp_path: Path) -> None:
    """A task of a task list; `predict` recognizes it."""
    model = save_tiny(tmp_path / "bert", FAMILIES["bert"], from_transformers=False)
    (tmp_path / "data").mkdir()
    write_dataset(tmp_path / "data")
    files = f"train_file: {tmp_path}/data:split=train\n    validation_file: {tmp_path}/data:split=validation"
    (tmp_path / "tasks.yaml").write_text(f"tasks:\n  mood:\n    kind: {TASK}\n    label_column: labels\n    {files}\n")
    out = tmp_path / "out"
    flags = QUICK | {"max_steps": 150, "per_device_batch_size": 32}
    command_output("finetune multitask", model=model, tasks=tmp_path / "tasks.yaml", output_dir=out, **flags)
    config = AutoConfig.from_pretrained(out)
    assert isinstance(config, CtxMultiTaskConfig)
    assert config.task_config("mood").problem_type == "multi_label_classification"
    metrics = TrainingSummary.load(out).metrics
    expected = {name: metrics[f"eval_mood_{name}"] for name in ("f1_micro", "f1_macro", "accuracy")}
    for model in (out, out / "checkpoint-150"):  # the columns of the task list are saved
        flags = {"task_name": "mood", "input": f"{tmp_path}/data:split=validation", "overwrite": True}
        printed = command_output("predict", model=model, output=tmp_path / "a.jsonl", **flags)
        assert printed_scores(printed) == pytest.approx(expected, abs=1e-4)
        (out / "training_summary.json").unlink(missing_ok=True)  # as in an unfinished run
    assert expected["f1_micro"] > metrics["baseline_mood_f1_micro"]


@pytest.mark.parametrize("family", ["gpt", "elmo", "cvt", "ulmfit", "word2vec"])
def test_families(tmp_path: Path, family: str) -> None:
    model = save_tiny(tmp_path / family, FAMILIES[family], from_transformers=False)
    (tmp_path / "data").mkdir()
    data = write_dataset(tmp_path / "data")
    command_output("finetune", TASK, model=model, output_dir=tmp_path / "out", **data, **QUICK | {"max_steps": 5})
    results = Predictor.open(str(tmp_path / "out")).predict_file(f"{tmp_path}/data:split=test").results
    assert [*results[0]["probabilities"]] == ORDER
