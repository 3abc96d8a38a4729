"""Adapters in the commands: language and task adapters, cross-lingual transfer, conversion."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, flag_list
from entities import VERBS, save_tiny_bert, tagged_sentences, write_wikiann
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
    """A tiny masked LM, and texts and NER files in three languages."""
    folder = tmp_path_factory.mktemp("adapters")
    save_tiny_bert(folder / "model", "AutoModelForMaskedLM")
    for language in VERBS:
        rows = tagged_sentences(language, 64)
        (folder / f"{language}.txt").write_text("\n\n".join(" ".join(word for word, _ in row) for row in rows) + "\n")
        for split in ("train", "dev", "test") if language == "en" else ("test",):
            write_wikiann(folder / f"{language}.{split}.wikiann", language, rows)
    return folder


def language_flags(workspace: Path) -> list[object]:
    flags = {"model": workspace / "model", "dataset": workspace / "en.txt", "objective": "mlm"}
    return [*flag_list(**flags, validation_fraction=0, max_steps=6, save_steps=3), *FLAGS]


@pytest.fixture(scope="module")
def adapter_dirs(workspace: Path) -> dict[str, Path]:
    """Adapter directories: English is trained, German has small random weights, French large ones."""
    command_output("pretrain", *language_flags(workspace), "--adapter", LANGUAGE, "--output_dir", workspace / "en")
    for language, std in (("de", 0.02), ("fr", 3.0)):
        model = AutoModelForMaskedLM.from_pretrained(workspace / "model")
        add_adapter(model, language, "madx-language")
        for name, parameter in model.named_parameters():
            if f".{language}." in name:
                parameter.data.normal_(std=std)
        save_adapter(model, language, workspace / language)
    return {"en": workspace / "en" / "adapters" / "en", "de": workspace / "de", "fr": workspace / "fr"}


def test_language_adapter_is_trained_resumed_and_loaded(workspace: Path, adapter_dirs: dict[str, Path]) -> None:
    output_dir, initial = workspace / "en", load_file(workspace / "model" / "model.safetensors")
    saved = load_file(output_dir / "model.safetensors")
    assert saved.keys() == initial.keys()
    assert all(torch.equal(saved[name], initial[name]) for name in initial)
    assert {path.name for path in (output_dir / "adapters").iterdir()} == {"en", "stack.json"}
    uninterrupted = load_file(output_dir / "adapters" / "en" / "adapter.safetensors")
    resumed_run = workspace / "resumed"
    shutil.copytree(output_dir, resumed_run)
    for path in (resumed_run / "checkpoint-6", resumed_run / "adapters"):
        shutil.rmtree(path)
    flags = [*language_flags(workspace), "--output_dir", resumed_run, "--resume"]
    assert "adapters is" in command_output("pretrain", *flags, "--adapter", "pfeiffer:name=en", fails=True)
    command_output("pretrain", *flags, "--adapter", LANGUAGE)
    resumed = load_file(resumed_run / "adapters" / "en" / "adapter.safetensors")
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
    error = command_output(
        "pretrain", *flags[2:], "--family", "bert", "--tokenizer", output_dir, "--adapter", LANGUAGE, fails=True
    )
    assert "no model is given" in error
    assert "--adapter" in error
    model = AutoModelForMaskedLM.from_pretrained(output_dir)
    base_weights = {name: value.clone() for name, value in model.named_parameters()}
    assert load_saved_adapters(model, output_dir) == ["en"]
    assert get_active_adapters(model) == ("en",)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in base_weights.items())


@pytest.mark.slow
def test_task_adapter_on_language_adapter(workspace: Path, adapter_dirs: dict[str, Path]) -> None:
    ner_dir = workspace / "ner"
    files = ["--train_file", workspace / "en.train.wikiann", "--validation_file", workspace / "en.dev.wikiann"]
    flags = ["token-classification", "--model", workspace / "model", *files, *FLAGS, "--max_steps", 250]
    adapter = ["--adapter", f"houlsby:name=ner,reduction_factor=4,leave_out=0,frozen_adapters={adapter_dirs['en']}"]
    command_output("finetune", *flags, *adapter, "--output_dir", ner_dir)
    summary = json.loads((ner_dir / "training_summary.json").read_text())
    assert summary["metrics"]["eval_f1"] > 0.9
    saved, initial = load_file(ner_dir / "model.safetensors"), load_file(workspace / "model" / "model.safetensors")
    shared_names = [name for name in saved if name in initial]
    assert len(shared_names) > 10
    assert all(torch.equal(saved[name], initial[name]) for name in shared_names)
    model = AutoModelForTokenClassification.from_pretrained(ner_dir)
    assert sorted(load_saved_adapters(model, ner_dir)) == ["en", "ner"]
    assert get_active_adapters(model) == ("en", "ner")
    assert [name for name, _ in model.named_parameters() if ".ner." in name and "layers.0." in name] == []
    paths = adapter_dirs["en"], ner_dir / "adapters" / "en"
    original, copied = (load_file(path / "adapter.safetensors") for path in paths)
    assert all(torch.equal(original[name], copied[name]) for name in original)
    published_files = repository_files(ner_dir, "org/ner")
    write_files(published_files, str(workspace / "published"), str(ner_dir))
    downloaded = AutoModelForTokenClassification.from_pretrained(workspace / "published")
    assert sorted(load_saved_adapters(downloaded, workspace / "published")) == ["en", "ner"]
    assert all(torch.equal(value, downloaded.state_dict()[name]) for name, value in model.state_dict().items())
    check_commands_use_adapters(ner_dir, model.eval(), workspace)
    for invalid, message in (
        (["--adapter", "houlsby", "--freeze", "encoder"], "--adapter cannot be combined with --freeze"),
        (["--adapter", "houlsby:width=3"], "Unknown option 'width'"),
    ):
        assert message in command_output("finetune", *flags, *invalid, "--output_dir", workspace / "none", fails=True)


def check_commands_use_adapters(path: Path, model: Any, workspace: Path) -> None:
    """Check that exported models and teachers use the adapters of the directory."""
    batch = dict(AutoTokenizer.from_pretrained(path)(["Anna saw Paris", "Rome sah"], padding=True, return_tensors="pt"))
    is_token = batch["attention_mask"] == 1

    def relative_error(candidate: Any) -> float:
        """Largest absolute difference of the logits, relative to the largest logit."""
        with torch.no_grad():
            expected = model(**batch).logits[is_token]
            return float((candidate(**batch).logits[is_token] - expected).abs().max() / expected.abs().max())

    without_adapters = AutoModelForTokenClassification.from_pretrained(path).eval()
    assert relative_error(without_adapters) > 0.2
    assert relative_error(Teacher.open(str(path)).load("AutoModelForTokenClassification")) < 1e-6
    command_output("export torch", "--model", path, "--output", workspace / "ner.pt2")
    assert relative_error(torch.export.load(workspace / "ner.pt2").module()) < 1e-4
    (workspace / "ner-int8" / "adapters" / "old").mkdir(parents=True)
    flags = flag_list(model=path, output_dir=workspace / "ner-int8")
    assert "already holds adapters" in command_output("export int8", *flags, fails=True)
    command_output("export int8", *flags, "--overwrite", "true")
    quantized = AutoModelForTokenClassification.from_pretrained(workspace / "ner-int8").eval()
    assert load_saved_adapters(quantized, workspace / "ner-int8") == ["en", "ner"]
    assert relative_error(quantized) < 0.05
    digest = Teacher.open(str(path)).digest
    shutil.copytree(path, workspace / "other")
    (workspace / "other" / "adapters" / "stack.json").write_text('{"active": ["ner"]}')
    assert Teacher.open(str(workspace / "other")).digest != digest


@pytest.mark.slow
def test_transfer_with_language_adapters(workspace: Path, adapter_dirs: dict[str, Path]) -> None:
    """The test language's adapter is stacked below the task adapter; the large weights of French reduce its F1."""
    output_dir, files = workspace / "transfer", {language: workspace / f"{language}.test.wikiann" for language in VERBS}
    flags = ["--model", workspace / "model", "--task", "ner", "--max_steps", 250, *FLAGS]
    flags += ["--adapter", "houlsby:name=tagger,reduction_factor=2"]
    flags += ["--train", f"en={workspace / 'en.train.wikiann'}", "--validation_file", workspace / "en.dev.wikiann"]
    flags += ["--test", ",".join(f"{name}={files[name]}" for name in files)]
    invalid_flags = flag_list(language_adapters="en=x", output_dir=workspace / "none")
    assert "no adapter of the language 'de'" in command_output("evaluate transfer", *flags, *invalid_flags, fails=True)
    adapter_paths = ",".join(f"{name}={folder}" for name, folder in adapter_dirs.items())
    command_output("evaluate transfer", *flags, "--language_adapters", adapter_paths, "--output_dir", output_dir)
    rows = json.loads((output_dir / "transfer.json").read_text())["languages"]
    f1 = {row["language"]: row["metrics"]["f1"] for row in rows}
    assert f1["en"] > 0.9
    assert f1["de"] > 0.8 > 0.5 > f1["fr"]
    assert json.loads((output_dir / "adapters" / "stack.json").read_text()) == {"active": ["en", "tagger"]}
    model = AutoModelForTokenClassification.from_pretrained(output_dir)
    load_saved_adapters(model, output_dir)
    replace_lowest_adapter(model, "other", str(adapter_dirs["de"]))
    assert get_active_adapters(model) == ("other", "tagger")


def test_converted_adapters_match_reference(shared_data: Path, tmp_path: Path) -> None:
    for name in ("lang", "houlsby"):
        source = shared_data / "adapters_fixture" / "bert" / f"{name}_bin"
        assert name in command_output("convert adapter", adapter=source, output=tmp_path / name)
        for path in (source.parent / name).glob("*.safetensors"):
            converted, expected = load_file(tmp_path / name / path.name), load_file(path)
            assert converted.keys() == expected.keys()
            assert all(torch.equal(converted[key], expected[key]) for key in expected)
        model = FAMILIES["bert"].models["AutoModel"].from_pretrained(source.parent / "model")
        assert load_adapter(model, tmp_path / name) == name
    error = command_output("convert adapter", adapter=tmp_path / "none", output=tmp_path / "x", fails=True)
    assert "There is no such directory" in error
