"""Lists of tasks: content of a file, and errors that name its file, line and key."""

from pathlib import Path

import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.multitask.task_list import read_task_list
from hf_ctxmodels.downstream.tasks import TaskArguments

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
    found = read_task_list(file, TaskArguments(label_column="gold", max_length=99), tmp_path)
    assert (found.sampling, found.temperature) == ("temperature", 2.0)
    rte, cola = found.tasks
    assert (rte.name, rte.kind, rte.weight, rte.answer_steps) == ("rte", "sequence-classification", 0.5, 3)
    assert rte.train_file == str(tmp_path / "rte.tsv")
    assert rte.arguments == TaskArguments("premise,hypothesis", "gold", max_length=99)
    assert (cola.head_dropout, cola.metric, cola.validation_file) == (0.05, "matthews_correlation", "demo")
    assert cola.arguments == TaskArguments("4", "2", max_length=64)
    monkeypatch.chdir(tmp_path)
    assert read_task_list(file, TaskArguments()).tasks[0].train_file == "rte.tsv"
    file.write_text(f"folder: {tmp_path}\nsampling: annealed\n" + LIST.partition("temperature: 2\n")[2])
    again = read_task_list(file, TaskArguments())
    assert (again.sampling, again.tasks[0].train_file) == ("annealed", str(tmp_path / "rte.tsv"))


def test_flags_that_no_task_of_a_list_reads_are_refused(file: Path, tmp_path: Path) -> None:
    """Those that one kind reads are defaults, whatever kinds the list has."""
    with pytest.raises(CtxError, match="No task of a task list uses it") as raised:
        read_task_list(file, TaskArguments(num_beams=2), tmp_path)
    assert raised.value.location == "--num_beams"
    assert read_task_list(file, TaskArguments(doc_stride=3), tmp_path).tasks[0].arguments.doc_stride == 3
