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
def test_long_loss_curve_keeps_both_ends(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    summary = TrainingSummary.load(directory)
    summary.curve = [{"step": step, "loss": 1.0} for step in range(1, 1001)]
    summary.save(directory)
    text = str(model_card(directory, REPO))
    rows = [line for line in text.splitlines() if line.endswith("| 1 |")]
    assert len(rows) == 10
    assert rows[0] == "| 1 | 1 |"
    assert rows[-1] == "| 1000 | 1 |"


@few_families
def test_results_table_of_metrics_without_baseline(saved_model: Path) -> None:
    summary = TrainingSummary.load(saved_model)
    summary.metrics = {"eval_accuracy": 0.75, "baseline_accuracy": 0.5, "f1": 0.25}
    rows = [["metric", "model", "baseline"], ["accuracy", "0.75", "0.5"], ["f1", "0.25", ""]]
    assert [row[:3] for row in results_table(summary)] == rows


@few_families
def test_card_without_training_summary(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    parameters = TrainingSummary.load(directory).parameters
    (directory / "training_summary.json").unlink()
    card = model_card(directory, REPO)
    assert metadata_errors(str(card)) == []
    assert f"{parameters:,} parameters" in str(card)
    assert "no record of how the model was trained" in str(card)
