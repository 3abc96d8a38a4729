"""Adapters by the commands: language and task adapters, transfer between languages, conversion."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, flag_list
from entities import VERBS, save_bert, tagged_sentences, write_entities
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

from hf_ctxmodels.compression.distillation import Teacher
from hf_ctxmodels.downstream.adapters import (
    add_adapter,
    get_active_adapters,
    load_adapter,
    load_saved_adapters,
    save_adapter,
)
from hf_ctxmodels.downstream.adapters.arguments import replace_lowest_adapter
from hf_ctxmodels.hub.repository import repository_files, write_files
from hf_ctxmodels.registry import FAMILIES

ROOT = Path(__file__).parents[2]
LANGUAGE = "madx-language:name=en"
FLAGS = ["--per_device_batch_size", 8, "--max_length", 24, "--dataloader_workers", 0, "--learning_rate", "2e-2"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny masked LM, texts of three languages, and entities in them."""
    folder = tmp_path_factory.mktemp("adapters")
    save_bert(folder / "model", "AutoModelForMaskedLM")
    for language in VERBS:
        rows = tagged_sentences(language, 64)
        (folder / f"{language}.txt").write_text("\n\n".join(" ".join(word for word, _ in row) for row in rows) + "\n")
        for split in ("train", "dev", "test") if language == "en" else ("test",):
            write_entities(folder / f"{language}.{split}.wikiann", language, rows)
    return folder


def language_flags(workspace: Path) -> list[object]:
    flags = {"model": workspace / "model", "dataset": workspace / "en.txt", "objective": "mlm"}
    return [*flag_list(**flags, validation_fraction=0, max_steps=6, save_steps=3), *FLAGS]


@pytest.fixture(scope="module")
def languages(workspace: Path) -> dict[str, Path]:
    """Folders of adapters: English trained by the command, German random, and French with a large error."""
    command_output("pretrain", *language_flags(workspace), "--adapter", LANGUAGE, "--output_dir", workspace / "en")
    for language, size in (("de", 0.02), ("fr", 3.0)):
        model = AutoModelForMaskedLM.from_pretrained(workspace / "model")
        add_adapter(model, language, "madx-language")
        for name, parameter in model.named_parameters():
            if f".{language}." in name:
                parameter.data.normal_(std=size)
        save_adapter(model, language, workspace / language)
    return {"en": workspace / "en" / "adapters" / "en", "de": workspace / "de", "fr": workspace / "fr"}


def test_language_adapter(workspace: Path, languages: dict[str, Path]) -> None:
    run, start = workspace / "en", load_file(workspace / "model" / "model.safetensors")
    saved = load_file(run / "model.safetensors")
    assert saved.keys() == start.keys()
    assert all(torch.equal(saved[name], start[name]) for name in start)
    assert {path.name for path in (run / "adapters").iterdir()} == {"en", "stack.json"}
    whole = load_file(run / "adapters" / "en" / "adapter.safetensors")
    resumed_run = workspace / "resumed"
    shutil.copytree(run, resumed_run)
    for path in (resumed_run / "checkpoint-6", resumed_run / "adapters"):
        shutil.rmtree(path)
    flags = [*language_flags(workspace), "--output_dir", resumed_run, "--resume"]
    assert "adapters is" in command_output("pretrain", *flags, "--adapter", "pfeiffer:name=en", fails=True)
    command_output("pretrain", *flags, "--adapter", LANGUAGE)
    resumed = load_file(resumed_run / "adapters" / "en" / "adapter.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    message = command_output(
        "pretrain", *flags[2:], "--family", "bert", "--tokenizer", run, "--adapter", LANGUAGE, fails=True
    )
    assert "no model is given" in message
    assert "--adapter" in message
    model = AutoModelForMaskedLM.from_pretrained(run)
    before = {name: value.clone() for name, value in model.named_parameters()}
    assert load_saved_adapters(model, run) == ["en"]
    assert get_active_adapters(model) == ("en",)
    fresh = AutoModelForMaskedLM.from_pretrained(workspace / "model")
    assert all(torch.equal(value, before[name]) for name, value in fresh.named_parameters())


def test_task_adapter(workspace: Path, languages: dict[str, Path]) -> None:
    run = workspace / "ner"
    files = ["--train_file", workspace / "en.train.wikiann", "--validation_file", workspace / "en.dev.wikiann"]
    flags = ["token-classification", "--model", workspace / "model", *files, *FLAGS, "--max_steps", 250]
    adapters = ["--adapter", f"houlsby:name=ner,reduction_factor=4,leave_out=0,frozen_adapters={languages['en']}"]
    command_output("finetune", *flags, *adapters, "--output_dir", run)
    summary = json.loads((run / "training_summary.json").read_text())
    assert summary["metrics"]["eval_f1"] > 0.9
    saved, start = load_file(run / "model.safetensors"), load_file(workspace / "model" / "model.safetensors")
    shared = [name for name in saved if name in start]
    assert len(shared) > 10
    assert all(torch.equal(saved[name], start[name]) for name in shared)
    model = AutoModelForTokenClassification.from_pretrained(run)
    assert sorted(load_saved_adapters(model, run)) == ["en", "ner"]
    assert get_active_adapters(model) == ("en", "ner")
    assert [name for name, _ in model.named_parameters() if ".ner." in name and "layers.0." in name] == []
    folders = languages["en"], run / "adapters" / "en"
    language, copy = (load_file(path / "adapter.safetensors") for path in folders)
    assert all(torch.equal(language[name], copy[name]) for name in language)
    published = repository_files(run, "org/ner")
    write_files(published, str(workspace / "published"), str(run))
    downloaded = AutoModelForTokenClassification.from_pretrained(workspace / "published")
    assert sorted(load_saved_adapters(downloaded, workspace / "published")) == ["en", "ner"]
    assert all(torch.equal(value, downloaded.state_dict()[name]) for name, value in model.state_dict().items())
    check_commands_use_adapters(run, model.eval(), workspace)
    for wrong, message in (
        (["--adapter", "houlsby", "--freeze", "encoder"], "--adapter cannot be combined with --freeze"),
        (["--adapter", "houlsby:width=3"], "Unknown option 'width'"),
    ):
        assert message in command_output("finetune", *flags, *wrong, "--output_dir", workspace / "none", fails=True)


def check_commands_use_adapters(run: Path, model: Any, workspace: Path) -> None:
    """Exported models and teachers of a directory with adapters use them."""
    batch = dict(AutoTokenizer.from_pretrained(run)(["Anna saw Paris", "Rome sah"], padding=True, return_tensors="pt"))
    real = batch["attention_mask"] == 1

    def difference(other: Any) -> float:
        """Largest difference of the logits, relative to the largest logit."""
        with torch.no_grad():
            expected = model(**batch).logits[real]
            return float((other(**batch).logits[real] - expected).abs().max() / expected.abs().max())

    plain = AutoModelForTokenClassification.from_pretrained(run).eval()
    assert difference(plain) > 0.2
    assert difference(Teacher.open(str(run)).load("AutoModelForTokenClassification")) < 1e-6
    command_output("export torch", "--model", run, "--output", workspace / "ner.pt2")
    assert difference(torch.export.load(workspace / "ner.pt2").module()) < 1e-4
    (workspace / "ner-int8" / "adapters" / "old").mkdir(parents=True)
    flags = flag_list(model=run, output_dir=workspace / "ner-int8")
    assert "already holds adapters" in command_output("export int8", *flags, fails=True)
    command_output("export int8", *flags, "--overwrite", "true")
    small = AutoModelForTokenClassification.from_pretrained(workspace / "ner-int8").eval()
    assert load_saved_adapters(small, workspace / "ner-int8") == ["en", "ner"]
    assert difference(small) < 0.05
    digest = Teacher.open(str(run)).digest
    shutil.copytree(run, workspace / "other")
    (workspace / "other" / "adapters" / "stack.json").write_text('{"active": ["ner"]}')
    assert Teacher.open(str(workspace / "other")).digest != digest


def test_transfer(workspace: Path, languages: dict[str, Path]) -> None:
    """The adapter of the test's language is below the task adapter; the large error of French shows it."""
    run, files = workspace / "transfer", {language: workspace / f"{language}.test.wikiann" for language in VERBS}
    flags = ["--model", workspace / "model", "--task", "ner", "--max_steps", 250, *FLAGS]
    flags += ["--adapter", "houlsby:name=tagger,reduction_factor=2"]
    flags += ["--train", f"en={workspace / 'en.train.wikiann'}", "--validation_file", workspace / "en.dev.wikiann"]
    flags += ["--test", ",".join(f"{name}={files[name]}" for name in files)]
    wrong_flags = flag_list(language_adapters="en=x", output_dir=workspace / "none")
    assert "no adapter of the language 'de'" in command_output("evaluate transfer", *flags, *wrong_flags, fails=True)
    start = ",".join(f"{name}={folder}" for name, folder in languages.items())
    command_output("evaluate transfer", *flags, "--language_adapters", start, "--output_dir", run)
    rows = json.loads((run / "transfer.json").read_text())["languages"]
    f1 = {row["language"]: row["metrics"]["f1"] for row in rows}
    assert f1["en"] > 0.9
    assert f1["de"] > 0.8 > 0.5 > f1["fr"]
    assert json.loads((run / "adapters" / "stack.json").read_text()) == {"active": ["en", "tagger"]}
    model = AutoModelForTokenClassification.from_pretrained(run)
    load_saved_adapters(model, run)
    replace_lowest_adapter(model, "other", str(languages["de"]))
    assert get_active_adapters(model) == ("other", "tagger")


def test_conversion(shared_data: Path, tmp_path: Path) -> None:
    for name in ("lang", "houlsby"):
        start = shared_data / "adapters_fixture" / "bert" / f"{name}_bin"
        assert name in command_output("convert adapter", adapter=start, output=tmp_path / name)
        for path in (start.parent / name).glob("*.safetensors"):
            converted, expected = load_file(tmp_path / name / path.name), load_file(path)
            assert converted.keys() == expected.keys()
            assert all(torch.equal(converted[key], expected[key]) for key in expected)
        model = FAMILIES["bert"].models["AutoModel"].from_pretrained(start.parent / "model")
        assert load_adapter(model, tmp_path / name) == name
    message = command_output("convert adapter", adapter=tmp_path / "none", output=tmp_path / "x", fails=True)
    assert "There is no such directory" in message
