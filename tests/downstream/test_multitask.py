"""One encoder with several heads against the plain models of its tasks, and files that list tasks."""

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
# A pooler, none, tied heads, an encoder-decoder, layers mixed by each head, a summary outside the encoder.
SHARED = ["bert", "roberta", "gpt2", "bart", "elmo", "xlnet"]


def cases_of(family: str) -> dict[str, Case]:
    """Task -> its head, for the tasks of a family that can share an encoder."""
    apart = {"choices"} if family == "roberta" else set()  # it pools in another way
    models = FAMILIES[family].models
    return {task: Case(FAMILIES[family], head) for task, head in HEADS.items() if head in models and task not in apart}


def several(family: str, **weights: float) -> CtxMultiTaskModel:
    """A tiny model of all tasks, each with labels of its own."""
    entries = {}
    for number, (task, case) in enumerate(cases_of(family).items()):
        config = case.config(id2label={label: f"{task} {label}" for label in range(case.config().num_labels)})
        setattr(config, config.head_dropout_field, 0.1 * number)
        entries[task] = task_entry(HEADS[task], config, weights.get(task, 1.0))
    torch.manual_seed(0)
    model = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=tiny_config(FAMILIES[family]), tasks=entries))
    return with_random_parameters(model, seed=1).eval()


@pytest.mark.parametrize("family", SHARED)
def test_task_equals_its_plain_model(family: str, tmp_path: Path, subtests) -> None:
    """The loss, the gradients and the files."""
    model = several(family)
    model.save_pretrained(tmp_path / family)
    opened, report = AutoModel.from_pretrained(tmp_path / family, output_loading_info=True)
    assert not any(report.values())
    assert type(opened) is CtxMultiTaskModel
    for task, case in cases_of(family).items():
        with subtests.test(task):
            batch = labeled_batch(case)
            opened.task(task).save_pretrained(tmp_path / task)
            plain, report = getattr(transformers, HEADS[task]).from_pretrained(
                tmp_path / task, output_loading_info=True
            )
            assert not any(report.values())
            assert type(plain) is case.model_class
            assert plain.config.id2label[0] == f"{task} 0"
            expected, output = plain(**batch), opened(**batch, task=task)
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(output[name], value), name
            plain_gradients, shared_gradients = gradients(plain, expected.loss), gradients(opened, output.loss)
            prefix = plain.base_model_prefix
            renamed = {
                f"encoder{name.removeprefix(prefix)}"
                if name.startswith(f"{prefix}.")
                else f"heads.{task}.{name}": value
                for name, value in plain_gradients.items()
            }
            assert_same_gradients({name: shared_gradients.pop(name) for name in renamed}, renamed)
            assert not any(value.any() for value in shared_gradients.values()), "heads of other tasks learn nothing"


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


LIST = """\
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
# A replacement in the list -> line and message of the error.
WRONG = {
    ("kind: sequence-classification\n    train_file: rte", "kind: parsing\n    train_file: rte"): (5, "'parsing'"),
    ("    answer_steps: 3", "    anser_steps: 3"): (10, "did you mean answer_steps"),
    ("    max_length: 64", "    max_length: long"): (17, "max_length is 'long', expected type int"),
    ("    max_length: 64", "    both_orders: 3"): (17, "both_orders is 3, expected type bool"),
    ("    max_length: 64", "    num_beams: 3"): (17, "sequence-classification does not read num_beams"),
    ("    weight: 5e-1", "    weight: -1"): (9, "weight is -1.0"),
    ("    head_dropout: 0.05", "    head_dropout: 1.5"): (18, "head_dropout is 1.5"),
    ("    train_file: cola.tsv", "    train_file: other.tsv"): (13, "no such file"),
    ("    train_file: cola.tsv\n", ""): (11, "cola has no train_file"),
    ("  cola:\n", "  rte:\n"): (11, "'rte' occurs twice in `tasks`, first in line 4"),
    ("temperature: 2", "temperature: 0"): (2, "above 0"),
    ("temperature: 2", "temperature: 2\nsampling: annealed"): (3, "'annealed' with a temperature"),
    ("temperature: 2", "sampling: uniform"): (2, "'uniform'"),
    ("temperature: 2", "heads: 2"): (2, "Unknown key 'heads'"),
    ("    kind: sequence-classification\n    train_file: rte.tsv", "    - kind"): (None, "not valid YAML"),
    (LIST[LIST.index("tasks:") :], "tasks: [rte]\n"): (3, "Expected keys and values in `tasks`"),
    (LIST, ""): (None, "is empty"),
    (LIST, "sampling: proportional"): (None, "is empty"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("rte", "cola"):
        (tmp_path / f"{name}.tsv").write_text("x")
    (tmp_path / "tasks.yaml").write_text(LIST)
    return tmp_path / "tasks.yaml"


@pytest.mark.parametrize(("correct", "wrong"), WRONG)
def test_errors_name_line_and_key(file: Path, tmp_path: Path, correct: str, wrong: str) -> None:
    line, message = WRONG[correct, wrong]
    assert LIST.count(correct) == 1
    file.write_text(LIST.replace(correct, wrong))
    with pytest.raises(CtxError) as raised:
        read_task_list(file, TaskArguments(), tmp_path)
    assert message in str(raised.value)
    assert str(raised.value.location).startswith(f"{file}:{line}" if line else str(file))


def test_content(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_list = read_task_list(file, TaskArguments(label_column="gold", max_length=99), tmp_path)
    assert (task_list.sampling, task_list.temperature) == ("temperature", 2.0)
    rte, cola = task_list.tasks
    assert (rte.name, rte.kind, rte.weight, rte.answer_steps) == ("rte", "sequence-classification", 0.5, 3)
    assert rte.train_file == str(tmp_path / "rte.tsv")
    assert rte.arguments == TaskArguments("premise,hypothesis", "gold", max_length=99)
    assert (cola.head_dropout, cola.metric, cola.validation_file) == (0.05, "matthews_correlation", "demo")
    assert cola.arguments == TaskArguments("4", "2", max_length=64)
    monkeypatch.chdir(tmp_path)
    assert read_task_list(file, TaskArguments()).tasks[0].train_file == "rte.tsv"
    file.write_text(f"folder: {tmp_path}\nsampling: annealed\n" + LIST.partition("temperature: 2\n")[2])
    annealed = read_task_list(file, TaskArguments())
    assert (annealed.sampling, annealed.tasks[0].train_file) == ("annealed", str(tmp_path / "rte.tsv"))


def test_flags_that_no_task_of_a_list_reads_are_refused(file: Path, tmp_path: Path) -> None:
    """Those that one kind reads are defaults, whatever kinds the list has."""
    with pytest.raises(CtxError, match="No task of a task list uses it") as raised:
        read_task_list(file, TaskArguments(num_beams=2), tmp_path)
    assert raised.value.location == "--num_beams"
    assert read_task_list(file, TaskArguments(doc_stride=3), tmp_path).tasks[0].arguments.doc_stride == 3
