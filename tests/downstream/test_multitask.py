"""One encoder with several heads: its losses, gradients and files against the plain models of its tasks."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel
from zoo import (
    FIRST_WORD,
    Case,
    assert_same_gradients,
    gradients,
    make_batch,
    make_targets,
    tiny_config,
    with_random_parameters,
)

from hf_ctxmodels import FAMILIES, CtxError, CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.cli import export
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.downstream.adapters import add_adapter
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.downstream.multitask.configuration import task_entry

HEADS = {
    "pairs": "AutoModelForSequenceClassification",
    "words": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
    "choices": "AutoModelForMultipleChoice",
}
# A pooler, none, tied heads, an encoder-decoder, layers mixed by each head, a summary outside the encoder.
SHARED = ["bert", "roberta", "gpt2", "bart", "elmo", "xlnet"]


def cases_of(family: str) -> dict[str, Case]:
    """Task -> its head, for those of a family that can share an encoder."""
    apart = {"choices"} if family == "roberta" else set()  # it pools in another way
    models = FAMILIES[family].models
    return {task: Case(FAMILIES[family], head) for task, head in HEADS.items() if head in models and task not in apart}


def several(family: str, **weights: float) -> CtxMultiTaskModel:
    """A tiny model of all tasks, each with labels of its own."""
    entries = {}
    for number, (task, case) in enumerate(cases_of(family).items()):
        config = case.config(id2label={place: f"{task} {place}" for place in range(case.config().num_labels)})
        setattr(config, config.head_dropout_field, 0.1 * number)
        entries[task] = task_entry(HEADS[task], config, weights.get(task, 1.0))
    torch.manual_seed(0)
    model = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=tiny_config(FAMILIES[family]), tasks=entries))
    return with_random_parameters(model, seed=1).eval()


def test_a_task_has_the_loss_the_gradients_and_the_files_of_its_plain_model(tmp_path: Path, subtests) -> None:
    for family in SHARED:
        model = several(family)
        model.save_pretrained(tmp_path / family)
        opened, report = AutoModel.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not any(report.values())
        assert type(opened) is CtxMultiTaskModel
        for task, case in cases_of(family).items():
            with subtests.test(f"{family} {task}"):
                batch = make_batch(case)
                batch |= make_targets(case, batch)
                opened.task(task).save_pretrained(tmp_path / task)
                plain, report = getattr(transformers, HEADS[task]).from_pretrained(
                    tmp_path / task, output_loading_info=True
                )
                assert not any(report.values())
                assert type(plain) is case.model_class
                assert plain.config.id2label[0] == f"{task} 0"
                expected, found = plain(**batch), opened(**batch, task=task)
                for name, value in expected.items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(found[name], value), name
                by_plain, by_several = gradients(plain, expected.loss), gradients(opened, found.loss)
                prefix = plain.base_model_prefix
                renamed = {
                    f"encoder{name.removeprefix(prefix)}"
                    if name.startswith(f"{prefix}.")
                    else f"heads.{task}.{name}": value
                    for name, value in by_plain.items()
                }
                assert_same_gradients({name: by_several.pop(name) for name in renamed}, renamed)
                assert not any(value.any() for value in by_several.values()), "heads of other tasks learn nothing"


def test_without_a_task_it_is_the_encoder_and_a_weight_counts_in_training_alone() -> None:
    model = several("bert", words=0.25)
    case = cases_of("bert")["words"]
    batch = make_batch(case)
    states = model(**batch).last_hidden_state
    assert torch.equal(states, model.encoder(**batch).last_hidden_state)
    batch |= make_targets(case, batch)
    plain = model(**batch, task="words").loss
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    output = model.train()(**batch, task="words")
    torch.testing.assert_close(output.loss, 0.25 * plain)
    assert model(**batch, task="words", return_dict=False)[0] == output.loss
    assert model.loss_targets == ("labels", "start_positions", "end_positions")
    counted = model(**batch, task="words", num_items_in_batch={"labels": 2 * (batch["labels"] != -100).sum()})
    torch.testing.assert_close(counted.loss, output.loss / 2)


def test_configurations_and_calls_that_cannot_be(tmp_path: Path, subtests, monkeypatch) -> None:
    model = several("bert")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["export", "--model", str(tmp_path), "--output", str(tmp_path / "model.onnx")])
    entry = dict(model.config.tasks["pairs"])
    encoder = tiny_config(FAMILIES["bert"])
    t5 = {task: task_entry(HEADS[task], tiny_config(FAMILIES["t5"])) for task in ("pairs", "words")}
    calls = {
        "no task 'rte'": lambda: model(torch.tensor([[FIRST_WORD]]), task="rte"),
        "use one of pairs, words": lambda: model.task("rte"),
        "'values' is not a valid name": lambda: CtxMultiTaskConfig(encoder=encoder, tasks={"values": entry}),
        "'a.b' is not a valid name": lambda: CtxMultiTaskConfig(encoder=encoder, tasks={"a.b": entry}),
        "has no AutoModelForSeq2SeqLM": lambda: CtxMultiTaskConfig(
            encoder=encoder, tasks={"rte": {**entry, "auto_class": "AutoModelForSeq2SeqLM"}}
        ),
        "has no field depth": lambda: CtxMultiTaskConfig(
            encoder=encoder, tasks={"rte": {**entry, "fields": {"depth": 3}}}
        ),
        "Expected auto_class, fields, loss_weight": lambda: CtxMultiTaskConfig(encoder=encoder, tasks={"rte": {}}),
        "cannot share an encoder": lambda: CtxMultiTaskModel(
            CtxMultiTaskConfig(encoder=tiny_config(FAMILIES["t5"]), tasks=t5)
        ),
        "There is no family": lambda: CtxMultiTaskConfig(encoder={"model_type": "parser"}),
        "several tasks: choices, pairs, spans, words": lambda: load_saved_model(str(tmp_path)),
        r'save one task with model\.task\("choices"\)\.save_pretrained': lambda: export.graph("onnx"),
    }
    coded, adapted = several("bert"), several("bert")
    quantize_model(coded, CtxInt8Config())
    add_adapter(adapted, "a")
    calls |= {"no plain weights": lambda: coded.task("pairs"), "has adapters": lambda: adapted.task("pairs")}
    for message, call in calls.items():
        with subtests.test(message), pytest.raises(CtxError, match=message):
            call()
    assert AutoConfig.from_pretrained(tmp_path).task_config("words").id2label[1] == "words 1"
    assert CtxMultiTaskModel(CtxMultiTaskConfig())(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 128)
