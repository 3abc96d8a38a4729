"""The model card describes the training run, and its metadata is valid on the Hub."""

import json
import shutil
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from hub_repository import metadata_errors
from huggingface_hub import ModelCard
from zoo import ARCHETYPE_FAMILIES, pretraining_auto_class

from hf_ctxmodels.hub import loss_curve_png, model_card
from hf_ctxmodels.hub.card import install_command, results_table
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.summary import TrainingSummary

REPO = "zoo/tiny-model"

# Tests that do not depend on the family run for a few families only.
few_families = pytest.mark.parametrize("family", ARCHETYPE_FAMILIES, indirect=True, ids=lambda family: family.name)


def test_card_contains_training_summary(saved_model: Path, family: FamilySpec) -> None:
    summary = TrainingSummary.load(saved_model)
    text = str(model_card(saved_model, REPO))
    for fact in (
        f"| task | {summary.task}{f': objective `{summary.objective}`' if summary.objective else ''} |",
        f"| data | {summary.dataset} |",
        "| masked | 0.1498 |",
        f"| seed | {summary.seed} |",
        f"{summary.parameters:,}",
        "| loss | 2.25 | 3.5 | lower is better |",
        "| 40 | 3 |",
        f'{pretraining_auto_class(family)}.from_pretrained("{REPO}")',
        family.paper,
    ):
        assert fact in text, fact
    assert f"\n{install_command()}\n" in text
    assert "{{" not in text
    assert "None" not in text
    assert metadata_errors(text) == []
    reloaded = ModelCard(text)
    assert [(result.metric_type, result.metric_value) for result in reloaded.data.eval_results] == [("eval_loss", 2.25)]
    tags = {"AutoModelForMaskedLM": "fill-mask", "AutoModelForCausalLM": "text-generation"}
    # the saved model is a language model, which these Auto classes open as well, or the model of a task
    tags |= {"AutoModelForSequenceClassification": "text-classification"} if not family.objectives else {}
    expected = next((tag for name, tag in tags.items() if name in family.models), "feature-extraction")
    assert reloaded.data.pipeline_tag == expected


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, 'pip install "hf_ctxmodels>=9.8.7"'),
        (
            {"url": "https://host/zoo.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "pip install git+https://host/zoo.git@abc123",
        ),
        ({"url": "https://host/zoo.whl", "archive_info": {}}, "pip install https://host/zoo.whl"),
        ({"url": "file:///home/user/zoo", "dir_info": {"editable": True}}, "pip install PATH_OR_URL"),
    ],
)
def test_install_command_by_source_of_package(direct_url, expected, tmp_path, monkeypatch) -> None:
    """The card of a model does not contain the local path of the package."""
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.4\nName: hf_ctxmodels\nVersion: 9.8.7\n")
    if direct_url is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr("hf_ctxmodels.hub.card.distribution", lambda name: PathDistribution(tmp_path))
    assert install_command().partition("  #")[0] == expected


def test_install_command_of_local_package_names_the_repository(tmp_path, monkeypatch) -> None:
    urls = {"Documentation": "https://host/docs", "Repository": "https://host/zoo.git", "Tracker": "https://host/bugs"}
    lines = ["Metadata-Version: 2.4", "Name: hf_ctxmodels", "Version: 9.8.7"]
    lines += [f"Project-URL: {name}, {url}" for name, url in urls.items()]
    (tmp_path / "METADATA").write_text("\n".join(lines) + "\n")
    (tmp_path / "direct_url.json").write_text(json.dumps({"url": "file:///home/user/zoo", "dir_info": {}}))
    monkeypatch.setattr("hf_ctxmodels.hub.card.distribution", lambda name: PathDistribution(tmp_path))
    assert install_command() == "pip install git+https://host/zoo.git"


@few_families
def test_loss_curve_image(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card contains the image instead of the table; no image without losses or without matplotlib."""
    text = str(model_card(saved_model, REPO, curve_image="loss_curve.png"))
    assert "![Training loss by step](loss_curve.png)" in text
    assert "| step | loss |" not in text
    summary = TrainingSummary.load(saved_model)
    assert loss_curve_png(summary).startswith(b"\x89PNG")
    summary.curve = []
    assert loss_curve_png(summary) is None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert loss_curve_png(TrainingSummary.load(saved_model)) is None


@few_families
def test_long_loss_curve_is_sampled_evenly(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    summary = TrainingSummary.load(directory)
    summary.curve = [{"step": step, "loss": 1.0} for step in range(1, 1001)]
    summary.save(directory)
    text = str(model_card(directory, REPO))
    rows = [line for line in text.splitlines() if line.endswith("| 1 |")]
    assert rows == [f"| {step} | 1 |" for step in range(1, 1001, 111)]


@few_families
def test_results_table_of_metrics_without_baseline(saved_model: Path) -> None:
    summary = TrainingSummary.load(saved_model)
    summary.metrics = {"eval_accuracy": 0.75, "baseline_accuracy": 0.5, "f1": 0.25}
    rows = [["metric", "model", "baseline"], ["accuracy", "0.75", "0.5"], ["f1", "0.25", ""]]
    assert [row[:3] for row in results_table(summary)] == rows


@few_families
def test_results_table_of_multi_task_model(saved_model: Path) -> None:
    """The range of a metric depends on the task that its name begins with."""
    summary = TrainingSummary.load(saved_model)
    summary.task = "squad (question-answering), topics (sequence-classification), squad_pairs (regression)"
    summary.metrics = {
        "eval_topics_accuracy": 0.75, "baseline_topics_accuracy": 0.5, "baseline_topics_accuracy_tfidf": 0.625,
        "eval_squad_f1": 81.25, "upper_bound_squad_f1": 97.5, "eval_topics_matthews": 0.12345,
        "eval_squad_pairs_pearson": 0.5,
    }  # fmt: skip
    assert results_table(summary) == [
        ["metric", "model", "baseline", "TF-IDF", "upper bound", "range"],
        ["topics_accuracy", "0.75", "0.5", "0.625", "", "0 to 1"],
        ["squad_f1", "81.25", "", "", "97.5", "0 to 100"],
        ["topics_matthews", "0.1235", "", "", "", "-1 to 1"],
        ["squad_pairs_pearson", "0.5", "", "", "", "-1 to 1"],
    ]
    summary.metrics = {"baseline_accuracy": 0.5}
    assert results_table(summary) == []


@few_families
def test_card_describes_the_training_run(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    summary = TrainingSummary.load(directory)
    summary.objective, summary.task, summary.dataset = "masked_lm", "pretraining", "demo"
    summary.parameters, summary.versions, summary.warnings = 1234567, {"torch": "2.0", "numpy": "1.0"}, ["a was b"]
    summary.global_batch_size, summary.steps, summary.command = 1024, 2000, "train.py --seed 13"
    summary.save(directory)
    text = str(model_card(directory, REPO))
    section = text.partition("## How it was trained\n")[2].partition("## Limits\n")
    assert [line for line in section[0].splitlines() if line] == [
        "| | |",
        "|---|---|",
        "| task | pretraining: objective `masked_lm` |",
        "| objective options | mlm_probability 0.15 |",
        "| data | demo |",
        "| steps x examples | 2,000 x 1,024 |",
        "| tokens seen | 4,321 |",
        "| seed | 13 |",
        "| parameters | 1,234,567 |",
        "| versions | torch 2.0, numpy 1.0 |",
        "### Realized rates",
        "The rates are counted over a sample of the training examples, with the masks of the first epoch.",
        "| rate | value |",
        "|---|---|",
        "| masked | 0.1498 |",
        "### Results",
        "| metric | model | baseline | range |",
        "|---|---|---|---|",
        "| loss | 2.25 | 3.5 | lower is better |",
        "`baseline` predicts by frequencies or copies the source.",
        "### Loss",
        "| step | loss |",
        "|---|---|",
        *[f"| {step} | {5 - step / 20:.4g} |" for step in range(5, 41, 5)],
        "<details><summary>Command and hyper-parameters</summary>",
        "```",
        "train.py --seed 13",
        "```",
        "- learning_rate: 0.0001",
        "</details>",
    ]
    assert "\n- In this run a was b.\n" in section[2]
    assert "trained on demo only" in section[2]


@few_families
def test_card_without_training_summary(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    parameters = TrainingSummary.load(directory).parameters
    (directory / "training_summary.json").unlink()
    shutil.copyfile(directory / "model.safetensors", directory / "optimizer.safetensors")  # as in a checkpoint
    card = model_card(directory, REPO)
    assert metadata_errors(str(card)) == []
    assert f"{parameters:,} parameters" in str(card)
    assert "no record of how the model was trained" in str(card)
