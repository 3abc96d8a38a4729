"""Adapters written by the `adapters` library (AdapterHub): outputs, weights and files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels import (
    CtxBertForMaskedLM,
    CtxBertForSequenceClassification,
    CtxError,
    CtxXLMRobertaForMaskedLM,
    CtxXLMRobertaForSequenceClassification,
)
from hf_ctxmodels.downstream.adapters import (
    get_active_adapters,
    load_adapter,
    load_fusion,
    save_adapter,
    save_fusion,
    set_active_adapters,
)

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
CLASSES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]] = {
    "bert": (CtxBertForMaskedLM, CtxBertForSequenceClassification),
    "xlm-roberta": (CtxXLMRobertaForMaskedLM, CtxXLMRobertaForSequenceClassification),
}
SETUPS: dict[str, Any] = {
    "none": None,
    "lang": "lang",
    "task": "task",
    "houlsby": "houlsby",
    "lang_task": ["lang", "task"],
    "fusion": [["task", "task2"]],
}
both_types = pytest.mark.parametrize("model_type", CLASSES)


@pytest.fixture
def folder(shared_data: Path, model_type: str) -> Path:
    """Model, adapters and outputs written by the `adapters` library."""
    return shared_data / "adapters_fixture" / model_type


def load_model(folder: Path, head: int, *names: str) -> PreTrainedModel:
    model = CLASSES[folder.name][head].from_pretrained(folder / "model", num_labels=3).eval()
    for name in names:
        assert load_adapter(model, folder / name) == name
    return model


def load_expected(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The expected tensors (those per token without padding), and the batch."""
    tensors = load_file(folder / "expected.safetensors")
    batch = {name: tensors.pop(name) for name in ("input_ids", "attention_mask")}
    token_mask = batch["attention_mask"] == 1
    return {name: value if "class" in name else value[token_mask] for name, value in tensors.items()}, batch


@both_types
@torch.no_grad()
def test_outputs_equal_adapters_library(folder: Path, subtests: pytest.Subtests) -> None:
    expected, batch = load_expected(folder)
    token_mask = batch["attention_mask"] == 1
    model = load_model(folder, 0, "lang", "task", "task2", "houlsby")
    load_fusion(model, folder / "fusion")
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for name, setup in SETUPS.items():
            with subtests.test(setup=name, attention=attention):
                set_active_adapters(model, setup)
                states = model.base_model(**batch).last_hidden_state
                torch.testing.assert_close(states[token_mask], expected[f"last_hidden_state.{name}"], **CLOSE)
        set_active_adapters(model, "lang")
        with subtests.test("embeddings, and the inverse adapter before the decoder", attention=attention):
            outputs = model(**batch, output_hidden_states=True)
            torch.testing.assert_close(outputs.hidden_states[0][token_mask], expected["hidden_state_0.lang"], **CLOSE)
            logits = outputs.logits[token_mask]
            torch.testing.assert_close(logits, expected["mlm_logits.lang"], **CLOSE)
            labels = batch["input_ids"].masked_fill(~token_mask, -100)
            loss = model(**batch, labels=labels, return_logits=False).loss
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, batch["input_ids"][token_mask]))
    with subtests.test("classifier on stacked adapters"):
        classifier = load_model(folder, 1, "lang", "task")
        set_active_adapters(classifier, ["lang", "task"])
        torch.testing.assert_close(classifier(**batch).logits, expected["class_logits.lang_task"], **CLOSE)


@both_types
def test_saved_files_equal_adapters_library(folder: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    names = ("lang", "task", "task2", "houlsby")
    model, classifier = load_model(folder, 0, *names), load_model(folder, 1, "task")
    load_fusion(model, folder / "fusion")
    save_fusion(model, ["task", "task2"], tmp_path / "fusion")
    for name in names:
        save_adapter(classifier if name == "task" else model, name, tmp_path / name, with_head=name in ("lang", "task"))
    saved_folders = sorted(tmp_path.iterdir())
    assert [saved_folder.name for saved_folder in saved_folders] == sorted((*names, "fusion"))
    for saved_folder in saved_folders:
        reference = folder / saved_folder.name
        with subtests.test(folder=saved_folder.name):
            assert {path.name for path in saved_folder.iterdir()} == {path.name for path in reference.iterdir()}
            for path in saved_folder.glob("*.safetensors"):
                weights, expected = load_file(path), load_file(reference / path.name)
                assert weights.keys() == expected.keys()
                assert all(torch.equal(weights[key], expected[key]) for key in expected)
            for path in saved_folder.glob("adapter*.json"):
                config, expected = (json.loads((root / path.name).read_text()) for root in (saved_folder, reference))
                assert {**config, "model_name": "", "model_class": expected["model_class"]} == expected


@both_types
@torch.no_grad()
def test_adapter_transformers_1_names_are_converted(folder: Path, tmp_path: Path) -> None:
    """The adapters are loaded under another name."""
    old_names = {
        "attention.output.adapters": "attention.output.attention_text_task_adapters",
        "invertible_adapters": "invertible_lang_adapters",
        "output.adapters": "output.layer_text_lang_adapters",
    }
    expected, batch = load_expected(folder)
    model = load_model(folder, 0)
    for name in ("lang", "houlsby"):
        shutil.copytree(folder / name, tmp_path / name)
        weights = {}
        for key, value in load_file(folder / name / "adapter.safetensors").items():
            fragment = next((fragment for fragment in old_names if fragment in key), None)
            weights[key if fragment is None else key.replace(fragment, old_names[fragment])] = value
        assert not any(".adapters." in key for key in weights)
        save_file(weights, tmp_path / name / "adapter.safetensors")
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        if name == "lang":
            config["config"]["inv_adapter"] = {"block_type": "nice", "non_linearity": "relu", "reduction_factor": 2}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        assert load_adapter(model, tmp_path / name, f"my_{name}") == f"my_{name}"
        set_active_adapters(model, f"my_{name}")
        states = model.base_model(**batch).last_hidden_state[batch["attention_mask"] == 1]
        torch.testing.assert_close(states, expected[f"last_hidden_state.{name}"], **CLOSE)


@both_types
def test_incompatible_files_raise(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, 0, "lang")
    other_type = "xlm-roberta" if folder.name == "bert" else "bert"
    shallow = CLASSES[folder.name][0].from_pretrained(folder / "model", num_hidden_layers=2)
    wide = type(model)(type(model.config)(**model.config.to_dict() | {"hidden_size": 64}))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    cases: list[tuple[PreTrainedModel, Path, str]] = [
        (model, folder / "task_bin", "hf-ctxmodels convert adapter"),
        (model, folder.parent / other_type / "task", "for models of type"),
        (wide, folder / "task", "width 32.*width 64"),
        (shallow, folder / "task", "no parameter .*layer.2"),
        (model, folder / "lang", "already has an adapter 'lang'"),
        (model, folder / "model", "no adapter_config.json"),
        (model, folder, "houlsby, houlsby_bin, lang"),
        (model, tmp_path, "model.load_adapter"),
        (model, folder / "fusion", "no adapter_config.json"),
    ]
    for target, path, message in cases:
        with pytest.raises(CtxError, match=message):
            load_adapter(target, path)
        assert get_active_adapters(target) == ()
    with pytest.raises(CtxError, match="no adapter 'task'"):
        load_fusion(model, folder / "fusion")
