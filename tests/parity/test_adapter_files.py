"""Adapters as the library adapters (AdapterHub) writes and computes them: every output, tensor and key."""

import json
import shutil
from collections.abc import Callable
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
each_type = pytest.mark.parametrize("kind", CLASSES)


@pytest.fixture
def fixture(shared_data: Path) -> Path:
    return shared_data / "adapters_fixture"


def opened(fixture: Path, kind: str, head: int, *names: str) -> PreTrainedModel:
    model = CLASSES[kind][head].from_pretrained(fixture / kind / "model", num_labels=3).eval()
    for name in names:
        assert load_adapter(model, fixture / kind / name) == name
    return model


def at_tokens(fixture: Path, kind: str) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """The expected outputs, a selection of real positions, and the batch."""
    expected = load_file(fixture / kind / "expected.safetensors")
    batch = {name: expected[name] for name in ("input_ids", "attention_mask")}
    return expected, lambda states: states[batch["attention_mask"] == 1], batch


@each_type
@torch.no_grad()
def test_outputs_are_those_of_the_library(fixture: Path, kind: str, subtests: pytest.Subtests) -> None:
    expected, real, batch = at_tokens(fixture, kind)
    model = opened(fixture, kind, 0, "lang", "task", "task2", "houlsby")
    load_fusion(model, fixture / kind / "fusion")
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for name, setup in SETUPS.items():
            with subtests.test(setup=name, attention=attention):
                set_active_adapters(model, setup)
                states = model.base_model(**batch).last_hidden_state
                torch.testing.assert_close(real(states), real(expected[f"last_hidden_state.{name}"]), **CLOSE)
        set_active_adapters(model, "lang")
        with subtests.test("embeddings and the inverse before the decoder", attention=attention):
            outputs = model(**batch, output_hidden_states=True)
            embedded = real(outputs.hidden_states[0])
            torch.testing.assert_close(embedded, real(expected["hidden_state_0.lang"]), **CLOSE)
            logits = real(outputs.logits)
            torch.testing.assert_close(logits, real(expected["mlm_logits.lang"]), **CLOSE)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels, return_logits=False).loss
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, real(batch["input_ids"])))
    with subtests.test("a classifier on the stack"):
        classifier = opened(fixture, kind, 1, "lang", "task")
        set_active_adapters(classifier, ["lang", "task"])
        torch.testing.assert_close(classifier(**batch).logits, expected["class_logits.lang_task"], **CLOSE)


@each_type
def test_written_folders_are_those_of_the_library(
    fixture: Path, kind: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    names = ("lang", "task", "task2", "houlsby")
    model, classifier = opened(fixture, kind, 0, *names), opened(fixture, kind, 1, "task")
    load_fusion(model, fixture / kind / "fusion")
    save_fusion(model, ["task", "task2"], tmp_path / "fusion")
    for name in names:
        save_adapter(classifier if name == "task" else model, name, tmp_path / name, with_head=name in ("lang", "task"))
    for folder in sorted(tmp_path.iterdir()):
        theirs = fixture / kind / folder.name
        with subtests.test(folder=folder.name):
            assert {path.name for path in folder.iterdir()} == {path.name for path in theirs.iterdir()}
            for path in folder.glob("*.safetensors"):
                written, given = load_file(path), load_file(theirs / path.name)
                assert written.keys() == given.keys()
                assert all(torch.equal(written[key], given[key]) for key in given)
            for path in folder.glob("adapter*.json"):
                written, given = (json.loads((each / path.name).read_text()) for each in (folder, theirs))
                assert {**written, "model_name": "", "model_class": given["model_class"]} == given


@each_type
def test_old_and_foreign_files(fixture: Path, kind: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Names of adapter-transformers 1, a name of its own in the model, and what is refused."""
    theirs = fixture / kind
    legacy = {"attention.output.adapters": "attention.output.attention_text_task_adapters"}
    legacy |= {"invertible_adapters": "invertible_lang_adapters", "output.adapters": "output.layer_text_lang_adapters"}
    with subtests.test("legacy names"):
        for name in ("lang", "houlsby"):
            shutil.copytree(theirs / name, tmp_path / name)
            tensors = {}
            for key, value in load_file(theirs / name / "adapter.safetensors").items():
                old = next((old for old in legacy if old in key), "")
                tensors[key.replace(old, legacy[old]) if old else key] = value
            assert not any(".adapters." in key for key in tensors)
            save_file(tensors, tmp_path / name / "adapter.safetensors")
            config = json.loads((tmp_path / name / "adapter_config.json").read_text())
            if name == "lang":
                config["config"]["inv_adapter"] = {"block_type": "nice", "non_linearity": "relu", "reduction_factor": 2}
            (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        expected, real, batch = at_tokens(fixture, kind)
        model = opened(fixture, kind, 0)
        for name in ("lang", "houlsby"):
            assert load_adapter(model, tmp_path / name, f"my_{name}") == f"my_{name}"
            set_active_adapters(model, f"my_{name}")
            states = model.base_model(**batch).last_hidden_state
            torch.testing.assert_close(real(states), real(expected[f"last_hidden_state.{name}"]), **CLOSE)
    model = opened(fixture, kind, 0, "lang")
    other = "xlm-roberta" if kind == "bert" else "bert"
    shallow = CLASSES[kind][0].from_pretrained(theirs / "model", num_hidden_layers=2)
    config = type(model.config)(**model.config.to_dict() | {"hidden_size": 64})
    foreign = tmp_path / "lora"
    foreign.mkdir()
    (foreign / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused: dict[str, tuple[PreTrainedModel, Path, str]] = {
        "a pickle": (model, theirs / "task_bin", "hf_ctxmodels.conversion.adapters"),
        "another type": (model, fixture / other / "task", "for models of type"),
        "another width": (type(model)(config), theirs / "task", "width 32.*width 64"),
        "another depth": (shallow, theirs / "task", "no parameter .*layer.2"),
        "a name that is taken": (model, theirs / "lang", "already has an adapter 'lang'"),
        "no adapter": (model, theirs / "model", "no adapter_config.json"),
        "a folder of folders": (model, theirs, "houlsby, houlsby_bin, lang"),
        "PEFT's": (model, foreign, "model.load_adapter"),
        "a fusion without its adapters": (model, theirs / "fusion", "no adapter_config.json"),
    }
    for what, (opened_model, folder, message) in refused.items():
        with subtests.test(what):
            with pytest.raises(CtxError, match=message):
                load_adapter(opened_model, folder)
            assert get_active_adapters(opened_model) == ()
    with subtests.test("adapters of a fusion are missing"), pytest.raises(CtxError, match="no adapter 'task'"):
        load_fusion(model, theirs / "fusion")
