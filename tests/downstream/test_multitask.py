"""Multi-task models, compared with single-task models, and task list files."""

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
    labeled_batch,
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
from hf_ctxmodels.downstream.multitask.task_list import read_task_list
from hf_ctxmodels.downstream.tasks import TaskArguments

HEADS = {
    "pairs": "AutoModelForSequenceClassification",
    "words": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
    "choices": "AutoModelForMultipleChoice",
}
# With and without pooler, tied heads, encoder-decoder, layer mix per head, summary outside the encoder.
FAMILY_NAMES = ["bert", "roberta", "gpt2", "bart", "elmo", "xlnet"]


def task_cases(family: str) -> dict[str, Case]:
    """Task -> case, for the tasks of a family that can share an encoder."""
    skip = {"choices"} if family == "roberta" else set()  # pools differently
    models = FAMILIES[family].models
    return {task: Case(FAMILIES[family], head) for task, head in HEADS.items() if head in models and task not in skip}


def multitask_model(family: str, **weights: float) -> CtxMultiTaskModel:
    """A tiny model of all tasks, with separate labels per task."""
    entries = {}
    for number, (task, case) in enumerate(task_cases(family).items()):
        config = case.config(id2label={label: f"{task} {label}" for label in range(case.config().num_labels)})
        setattr(config, config.head_dropout_field, 0.1 * number)
        entries[task] = task_entry(HEADS[task], config, weights.get(task, 1.0))
    torch.manual_seed(0)
    model = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=tiny_config(FAMILIES[family]), tasks=entries))
    return with_random_parameters(model, seed=1).eval()


@pytest.mark.fast_families("bert", "elmo")
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_task_matches_single_task_model(family: str, tmp_path: Path, subtests) -> None:
    """Outputs, gradients and saved files."""
    model = multitask_model(family)
    model.save_pretrained(tmp_path / family)
    reloaded, report = AutoModel.from_pretrained(tmp_path / family, output_loading_info=True)
    assert not any(report.values())
    assert type(reloaded) is CtxMultiTaskModel
    for task, case in task_cases(family).items():
        with subtests.test(task):
            batch = labeled_batch(case)
            reloaded.task(task).save_pretrained(tmp_path / task)
            single, report = getattr(transformers, HEADS[task]).from_pretrained(
                tmp_path / task, output_loading_info=True
            )
            assert not any(report.values())
            assert type(single) is case.model_class
            assert single.config.id2label[0] == f"{task} 0"
            expected, output = single(**batch), reloaded(**batch, task=task)
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(output[name], value), name
            single_gradients, actual_gradients = gradients(single, expected.loss), gradients(reloaded, output.loss)
            prefix = single.base_model_prefix
            expected_gradients = {
                f"encoder{name.removeprefix(prefix)}"
                if name.startswith(f"{prefix}.")
                else f"heads.{task}.{name}": value
                for name, value in single_gradients.items()
            }
            assert_same_gradients({name: actual_gradients.pop(name) for name in expected_gradients}, expected_gradients)
            assert not any(value.any() for value in actual_gradients.values()), "heads of other tasks have gradients"


def test_encoder_output_and_training_loss_weight() -> None:
    model = multitask_model("bert", words=0.25)
    case = task_cases("bert")["words"]
    batch = make_batch(case)
    states = model(**batch).last_hidden_state
    assert torch.equal(states, model.encoder(**batch).last_hidden_state)
    batch |= make_targets(case, batch)
    unweighted_loss = model(**batch, task="words").loss
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    output = model.train()(**batch, task="words")
    torch.testing.assert_close(output.loss, 0.25 * unweighted_loss)
    assert model(**batch, task="words", return_dict=False)[0] == output.loss
    assert model.loss_targets == ("labels", "start_positions", "end_positions")
    accumulated = model(**batch, task="words", num_items_in_batch={"labels": 2 * (batch["labels"] != -100).sum()})
    torch.testing.assert_close(accumulated.loss, output.loss / 2)


def test_invalid_configurations_and_calls_raise(tmp_path: Path, subtests, monkeypatch) -> None:
    model = multitask_model("bert")
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
    quantized, with_adapter = multitask_model("bert"), multitask_model("bert")
    quantize_model(quantized, CtxInt8Config())
    add_adapter(with_adapter, "a")
    calls |= {"no plain weights": lambda: quantized.task("pairs"), "has adapters": lambda: with_adapter.task("pairs")}
    for message, call in calls.items():
        with subtests.test(message), pytest.raises(CtxError, match=message):
            call()
    assert AutoConfig.from_pretrained(tmp_path).task_config("words").id2label[1] == "words 1"
    assert CtxMultiTaskModel(CtxMultiTaskConfig())(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 128)


TASK_LIST = """\
# two tasks
temperature: 2
tasks:
  rte:
    kind: sequence-classification
    train_file: rte.tsv
    validation_file: rte.tsv
    text_columns: [premise, hypothesis]
    weight: 5e-1
    answer_steps: 3
  cola:
    kind: sequence-classification
    train_file: cola.tsv
    validation_file: demo
    text_columns: 4
    label_column: 2
    max_length: 64
    head_dropout: 0.05
    metric: matthews_correlation
"""
# (text in the list, replacement) -> line and message of the error.
INVALID = {
    ("kind: sequence-classification\n    train_file: rte", "kind: parsing\n    train_file: rte"): (5, "'parsing'"),
    ("    answer_steps: 3", "    anser_steps: 3"): (10, "did you mean answer_steps"),
    ("    max_length: 64", "    max_length: long"): (17, "max_length is 'long', expected type int"),
    ("    max_length: 64", "    both_orders: 3"): (17, "both_orders is 3, expected type bool"),
    ("    max_length: 64", "    num_beams: 3"): (17, "sequence-classification does not read num_beams"),
    ("    weight: 5e-1", "    weight: -1"): (9, "weight is -1.0"),
    ("    head_dropout: 0.05", "    head_dropout: 1.5"): (18, "head_dropout is 1.5"),
    ("    head_dropout: 0.05", "    head_dropout: {{dropout}}"): (18, "value of head_dropout is not valid YAML"),
    ("    head_dropout: 0.05", "    head_dropout: 2020-13-45"): (18, "value of head_dropout is not valid YAML"),
    ("    train_file: cola.tsv", "    train_file: other.tsv"): (13, "no such file"),
    ("    train_file: cola.tsv\n", ""): (11, "cola has no train_file"),
    ("  cola:\n", "  rte:\n"): (11, "'rte' occurs twice, first in line 4"),
    ("tasks:\n", "tasks:\n  1: {}\n  '1': {}\n"): (5, "'1' occurs twice, first in line 4"),
    ("temperature: 2", "temperature: 0"): (2, "above 0"),
    ("temperature: 2", "temperature: 2\nsampling: annealed"): (3, "'annealed' with a temperature"),
    ("temperature: 2", "sampling: uniform"): (2, "'uniform'"),
    ("temperature: 2", "heads: 2"): (2, "Unknown key 'heads'"),
    ("    kind: sequence-classification\n    train_file: rte.tsv", "    - kind"): (None, "not valid YAML"),
    (TASK_LIST[TASK_LIST.index("tasks:") :], "tasks: [rte]\n"): (3, "Expected keys and values in `tasks`"),
    (TASK_LIST, ""): (None, "is empty"),
    (TASK_LIST, "sampling: proportional"): (None, "is empty"),
}


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    for name in ("rte", "cola"):
        (tmp_path / f"{name}.tsv").write_text("x")
    (tmp_path / "tasks.yaml").write_text(TASK_LIST)
    return tmp_path / "tasks.yaml"


@pytest.mark.parametrize(("original", "replacement"), INVALID)
def test_task_list_errors_report_line_and_key(task_file: Path, tmp_path: Path, original: str, replacement: str) -> None:
    line, message = INVALID[original, replacement]
    assert TASK_LIST.count(original) == 1
    task_file.write_text(TASK_LIST.replace(original, replacement))
    with pytest.raises(CtxError) as error:
        read_task_list(task_file, TaskArguments(), tmp_path)
    assert message in str(error.value)
    assert str(error.value.location).startswith(f"{task_file}:{line}" if line else str(task_file))


def test_task_list_content(task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_list = read_task_list(task_file, TaskArguments(label_column="gold", max_length=99), tmp_path)
    assert (task_list.sampling, task_list.temperature) == ("temperature", 2.0)
    rte, cola = task_list.tasks
    assert (rte.name, rte.kind, rte.weight, rte.answer_steps) == ("rte", "sequence-classification", 0.5, 3)
    assert rte.train_file == str(tmp_path / "rte.tsv")
    assert rte.arguments == TaskArguments("premise,hypothesis", "gold", max_length=99)
    assert (cola.head_dropout, cola.metric, cola.validation_file) == (0.05, "matthews_correlation", "demo")
    assert cola.arguments == TaskArguments("4", "2", max_length=64)
    monkeypatch.chdir(tmp_path)
    assert read_task_list(task_file, TaskArguments()).tasks[0].train_file == "rte.tsv"
    for source in ("https://example.org/rte.tsv", "nyu-mll/glue:config=rte"):
        task_file.write_text(TASK_LIST.replace("train_file: rte.tsv", f"train_file: {source}"))
        assert read_task_list(task_file, TaskArguments(), tmp_path).tasks[0].train_file == source
    (tmp_path / "rte").mkdir()
    for source in ("rte", "rte:split=train"):
        task_file.write_text(TASK_LIST.replace("train_file: rte.tsv", f"train_file: {source}"))
        assert read_task_list(task_file, TaskArguments(), tmp_path).tasks[0].train_file == f"{tmp_path}/{source}"
    task_file.write_text(f"folder: {tmp_path}\nsampling: annealed\n" + TASK_LIST.partition("temperature: 2\n")[2])
    annealed = read_task_list(task_file, TaskArguments())
    assert (annealed.sampling, annealed.tasks[0].train_file) == ("annealed", str(tmp_path / "rte.tsv"))


def test_files_of_other_tasks_may_be_missing(task_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").unlink()
    (task,) = read_task_list(task_file, TaskArguments(), tmp_path, only=["rte"]).tasks
    assert task.name == "rte"
    with pytest.raises(CtxError, match="no such file"):
        read_task_list(task_file, TaskArguments(), tmp_path, only=["cola"])
    with pytest.raises(CtxError, match="no task qqp"):
        read_task_list(task_file, TaskArguments(), tmp_path, only=["qqp"])


def test_flags_unused_by_all_tasks_raise(task_file: Path, tmp_path: Path) -> None:
    """Flags of any task kind are accepted as defaults, even if the list has no such task."""
    with pytest.raises(CtxError, match="No task of a task list uses it") as error:
        read_task_list(task_file, TaskArguments(num_beams=2), tmp_path)
    assert error.value.location == "--num_beams"
    assert read_task_list(task_file, TaskArguments(doc_stride=3), tmp_path).tasks[0].arguments.doc_stride == 3
