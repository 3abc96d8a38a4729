"""`finetune dependency-parsing` and `predict` on generated treebanks."""

import json
from pathlib import Path

import pytest
import yaml
from commands import command_output
from labeled_texts import save_tiny
from treebank_files import write_treebank

from hf_ctxmodels import AutoModelForDependencyParsing
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_log import read_log


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    names = {"train_file": "train", "validation_file": "validation", "unlabeled_file": "more"}
    return {
        flag: write_treebank(tmp_path / f"{name}.conllu", 24, seed) for seed, (flag, name) in enumerate(names.items())
    }


def finetune_cvt(files: dict[str, Path], folder: Path, **flags: object) -> str:
    """Output of `finetune dependency-parsing`, which writes into the folder `run`."""
    model = save_tiny(folder / "cvt", FAMILIES["cvt"], from_transformers=False)
    defaults = {"output_dir": folder / "run", "per_device_batch_size": 12, "logging_steps": 1, "seed": 0}
    return command_output("finetune", "dependency-parsing", model=model, **files, **(defaults | flags))


def test_finetune_cvt_and_predict(files: dict[str, Path], tmp_path: Path) -> None:
    """Unlabeled steps alternate with labeled ones; the saved parser predicts trees for new sentences."""
    output = finetune_cvt(files, tmp_path, max_steps=4, predictions_file=tmp_path / "validation.jsonl")
    assert "baseline: the head of each word is the next word" in output
    assert "las" in output
    is_unlabeled = ["cross_view_loss" in row for row in read_log(tmp_path / "run") if "loss" in row]
    assert is_unlabeled == [False, True] * 2

    predictions = tmp_path / "predictions.jsonl"
    output = command_output(
        "predict", model=tmp_path / "run", input=files["validation_file"], output=predictions, per_device_batch_size=5
    )
    assert "uas" in output
    records = read_lines(tmp_path / "validation.jsonl")
    assert [{"words": record["words"], **record["prediction"]} for record in records] == read_lines(predictions)
    assert all(record["prediction"]["heads"].count(0) == 1 for record in records)
    (tmp_path / "new.txt").write_text("old sailors find dogs.\ncats\n")
    lines = command_output("predict", model=tmp_path / "run", input=tmp_path / "new.txt").splitlines()
    first, second = map(json.loads, lines)
    assert first["words"] == ["old", "sailors", "find", "dogs", "."]
    assert len(first["relations"]) == 5
    assert second["heads"] == [0]

    command_output("push", model=tmp_path / "run", repo_id="org/parser", output_dir=tmp_path / "repository")
    card = (tmp_path / "repository" / "README.md").read_text()
    assert "from hf_ctxmodels import AutoModelForDependencyParsing\n" in card


@pytest.mark.slow
def test_cvt_learns_trees(files: dict[str, Path], tmp_path: Path) -> None:
    finetune_cvt(files, tmp_path, max_steps=60, learning_rate=0.01)
    metrics = json.loads((tmp_path / "run" / "training_summary.json").read_text())["metrics"]
    assert metrics["eval_las"] > 0.8 > 0.5 > metrics["baseline_las"]
    assert metrics["eval_uas"] >= metrics["eval_las"]


def test_finetune_adds_network_to_model_without_head(files: dict[str, Path], tmp_path: Path) -> None:
    bert = save_tiny(tmp_path / "bert", FAMILIES["bert"], from_transformers=False)
    flags = {"train_file": files["train_file"], "validation_file": files["validation_file"], "max_steps": 2}
    options = 'network_options={"hidden_size": 8, "scorer_size": 8}'
    output = command_output(
        "finetune", "dependency-parsing", model=bert, **flags, config_options=[options], output_dir=tmp_path / "run"
    )
    assert "uas" in output
    parser = AutoModelForDependencyParsing.from_pretrained(tmp_path / "run")
    assert parser.config.trainable_encoders == ["encoder"]
    error = command_output(
        "finetune", "dependency-parsing", model=bert, **files, output_dir=tmp_path / "run2", fails=True
    )
    assert "has no loss for unlabeled examples" in error


@pytest.mark.slow
def test_accumulation_equals_one_batch(files: dict[str, Path], tmp_path: Path) -> None:
    """Losses, gradient norms and metrics with labels; tests/models/test_cvt_parsing.py also accumulates views."""
    del files["unlabeled_file"]
    logs = []
    for name, size, micro_batches in (("whole", 12, 1), ("accumulated", 3, 4)):
        (tmp_path / name).mkdir()
        flags = {"per_device_batch_size": size, "gradient_accumulation_steps": micro_batches, "max_steps": 3}
        finetune_cvt(files, tmp_path / name, **flags)
        logs.append(read_log(tmp_path / name / "run"))
    for record, actual in zip(*logs, strict=True):
        for key in record.keys() - {"tokens_per_second", "run_tokens_per_second"}:
            assert actual[key] == pytest.approx(record[key], abs=1e-4), key


@pytest.mark.slow
def test_multitask_with_tagging(files: dict[str, Path], tmp_path: Path) -> None:
    """A parser and a tagger share an encoder and learn from the same unlabeled text (section 3.4)."""
    model = save_tiny(tmp_path / "cvt", FAMILIES["cvt"], from_transformers=False)
    entry = {"train_file": str(files["train_file"]), "validation_file": str(files["validation_file"])}
    tasks = {
        "trees": {"kind": "dependency-parsing", **entry},
        "tags": {"kind": "token-classification", "label_column": "DEPREL", **entry},
    }
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    output = command_output(
        "finetune", "multitask", model=model, tasks=tmp_path / "tasks.yaml", unlabeled_file=files["unlabeled_file"],
        max_steps=6, logging_steps=1, per_device_batch_size=12, output_dir=tmp_path / "run",
    )  # fmt: skip
    assert "las" in output
    rows = [row for row in read_log(tmp_path / "run") if "loss" in row]
    assert sum("cross_view_loss" in row for row in rows) == 3
    (tmp_path / "new.txt").write_text("old sailors find dogs\n")
    line = command_output("predict", "--all_tasks", model=tmp_path / "run", input=tmp_path / "new.txt")
    result = json.loads(line)
    assert result["trees"]["words"] == result["tags"]["words"] == ["old", "sailors", "find", "dogs"]
    assert result["trees"]["heads"].count(0) == 1
