"""Lists of tasks for learning them together: a YAML file -> their kinds, files and arguments.

sampling: proportional
tasks:
  rte:
    kind: sequence-classification
    train_file: RTE/train.tsv.gz
    validation_file: RTE/dev.tsv
    text_columns: sentence1,sentence2
    weight: 1.0
    head_dropout: 0.1
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.tasks import TASKS
from hf_ctxmodels.downstream.tasks.base import Task, TaskArguments, refuse_unread_flags

SAMPLINGS = ("proportional", "temperature", "annealed")
KINDS = tuple(name for name, task in TASKS.items() if not task.is_generative)


@dataclass(frozen=True)
class ListedTask:
    """A task of a list.

    Attributes:
        name: Its name.
        kind: A key of `TASKS`.
        train_file, validation_file: See `hf-ctxmodels finetune`.
        weight: Factor of its loss in training.
        head_dropout: Dropout before its head; None for the model's.
        answer_steps: Steps of an answer network for pairs (`heads.answer_network`); 0 for a linear classifier.
        answer_dropout: Rate at which training leaves out steps of the answer network; None for the model's.
        metric: Its main metric, of which the mean over the tasks is taken; None for the first of its kind.
        where: Its place in the file.
        arguments: Columns and length.
    """

    name: str
    kind: str
    train_file: str
    validation_file: str
    weight: float = 1.0
    head_dropout: float | None = None
    answer_steps: int = 0
    answer_dropout: float | None = None
    metric: str | None = None
    where: str = ""
    arguments: TaskArguments = field(default_factory=TaskArguments)

    def make(self) -> Task[Any]:
        """The task."""
        return TASKS[self.kind](self.arguments)


@dataclass(frozen=True)
class TaskList:
    """What a file says.

    Attributes:
        tasks: In the file's order.
        sampling: "proportional": all batches of all tasks, shuffled (MT-DNN); "temperature": each step drawn with
            probabilities proportional to n^(1/temperature) for n batches; "annealed": likewise with an exponent that
            falls from 1 to 0.2 over the epochs.
        temperature: Of the sampling of this name.
    """

    tasks: tuple[ListedTask, ...]
    sampling: str = "proportional"
    temperature: float = 1.0


_OF_LIST = ("tasks", "sampling", "temperature", "folder")
_OWN = tuple(each.name for each in fields(ListedTask) if each.name not in ("name", "where", "arguments"))
_COLUMNS = tuple(each.name for each in fields(TaskArguments))


def read_task_list(file: str | Path, defaults: TaskArguments, folder: str | Path | None = None) -> TaskList:
    """The tasks of a YAML file; see the module.

    Args:
        file: The file.
        defaults: Columns and length where a task does not give its own.
        folder: Where relative paths in the file start; None for its `folder`, or else the current directory.

    Raises:
        CtxError: It cannot be read, or a key or value is wrong; the message names file, line and key.
    """
    read = _Reader(file)
    top = read.mapping(read.root, "the file")
    read.check_keys(top, _OF_LIST, "a list of tasks")
    start = Path(folder if folder is not None else read.value(top, "folder", str, "."))
    listed = read.mapping(top["tasks"][1], "`tasks`") if "tasks" in top else {}
    if not listed:
        raise CtxError("The file lists no task.", location=str(file), hint="write tasks: and a name for each below it.")
    read_by_some = {name for kind in KINDS for name in TASKS[kind].reads}
    refuse_unread_flags(defaults, read_by_some, "No kind of task in a list reads it.")
    tasks = tuple(_task(read, name, *entry, defaults, start) for name, entry in listed.items())
    sampling = read.value(top, "sampling", str, "temperature" if "temperature" in top else "proportional")
    if sampling not in SAMPLINGS or (sampling == "temperature") != ("temperature" in top):
        raise CtxError(
            f"sampling is {sampling!r}" + (" beside a temperature." if "temperature" in top else "."),
            location=read.place(top, "sampling" if "sampling" in top else "temperature"),
            hint=f"use one of {', '.join(SAMPLINGS)}; `temperature: 2` belongs to that of this name alone.",
        )
    temperature = read.value(top, "temperature", float, 1.0)
    if not temperature > 0:
        raise CtxError("A temperature is above 0.", location=read.place(top, "temperature"), hint="use 2, for example.")
    return TaskList(tasks, sampling, temperature)


def _task(read: "_Reader", name: str, line: int, node: yaml.Node, defaults: TaskArguments, start: Path) -> ListedTask:
    where = f"{read.file}:{line}, task {name}"
    entry = read.mapping(node, f"the task {name}")
    read.check_keys(entry, (*_OWN, *_COLUMNS), f"the task {name}")
    if missing := [key for key in ("kind", "train_file", "validation_file") if key not in entry]:
        raise CtxError(f"The task {name} has no {' and no '.join(missing)}.", location=where, hint="add it.")
    hints = get_type_hints(ListedTask) | get_type_hints(TaskArguments)
    values = {key: read.value(entry, key, hints[key]) for key in entry}
    if values["kind"] not in KINDS:
        raise CtxError(
            f"The task {name} is of an unknown kind, {values['kind']!r}.",
            location=read.place(entry, "kind"),
            hint=f"use one of {', '.join(KINDS)}.",
        )
    for key, most in (("weight", math.inf), ("head_dropout", 1), ("answer_steps", 100), ("answer_dropout", 1)):
        value = values.get(key)
        if value is not None and not (0 <= value <= most and (value or key != "weight")):
            raise CtxError(f"{key} is {value}.", location=read.place(entry, key), hint="see the head of the example.")
    for key in ("train_file", "validation_file"):
        if values[key] != "demo":
            values[key] = str(start / values[key])
        if values[key] != "demo" and not Path(values[key]).is_file():
            raise CtxError(
                f"The task {name} has no such file: {values[key]}.",
                location=read.place(entry, key),
                hint="correct the path, or give the folder that it starts from, --tasks_folder.",
            )
    if unread := [key for key in entry if key in _COLUMNS and key not in TASKS[values["kind"]].reads]:
        raise CtxError(
            f"A task of the kind {values['kind']} does not read {unread[0]}.",
            location=read.place(entry, unread[0]),
            hint="remove the line.",
        )
    columns = replace(defaults, **{key: values.pop(key) for key in _COLUMNS if key in values})
    return ListedTask(name=name, where=where, arguments=columns, **values)


class _Reader:
    """A YAML file as nodes, whose lines errors name."""

    def __init__(self, file: str | Path) -> None:
        self.file = file
        if not Path(file).is_file():
            raise CtxError(
                "There is no such list of tasks.",
                location=str(file),
                hint="give the path of a YAML file, or the name of a list that `hf-ctxmodels recipes` shows.",
            )
        try:
            root = yaml.compose(read_text(file), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            raise CtxError(
                f"The list of tasks is not valid YAML: {error}.", location=str(file), hint="see the example."
            ) from error
        if root is None:
            raise CtxError("The list of tasks is empty.", location=str(file), hint="see the example.")
        self.root = root

    def mapping(self, node: yaml.Node, what: str) -> dict[str, tuple[int, yaml.Node]]:
        """Key -> its line and the node of its value; raises CtxError for other nodes and for a key given twice."""
        if not isinstance(node, yaml.MappingNode):
            raise CtxError(
                f"Expected keys and values in {what}.",
                location=f"{self.file}:{node.start_mark.line + 1}",
                hint="key: value",
            )
        found: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in found:
                raise CtxError(
                    f"{key.value!r} stands twice in {what}, first in line {found[key.value][0]}.",
                    location=f"{self.file}:{line}",
                    hint="remove one of them.",
                )
            found[key.value] = (line, value)
        return found

    def check_keys(self, given: Mapping[str, tuple[int, Any]], known: tuple[str, ...], what: str) -> None:
        """Raise CtxError for a key that is unknown."""
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise CtxError(
                    f"Unknown key {key!r} in {what}.",
                    location=self.place(given, key),
                    hint=(f"did you mean {near[0]}? " if near else "") + f"Known are {', '.join(known)}.",
                )

    def place(self, given: Mapping[str, tuple[int, Any]], key: str) -> str:
        """`file:line, key` of a key."""
        return f"{self.file}:{given[key][0]}, {key}"

    def value(self, given: Mapping[str, tuple[int, yaml.Node]], key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key in the type of its field; raises CtxError where it is of another one."""
        if key not in given:
            return default
        node = given[key][1]
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        kinds = {each for each in getattr(kind, "__args__", (kind,)) if each is not type(None)}
        if str in kinds and not isinstance(value, bool) and value is not None:
            value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if float in kinds and isinstance(value, int | str) and not isinstance(value, bool):
            value = _as_float(value)
        if type(value) not in kinds and not (value is None and kinds != {kind}):
            wanted = " or ".join(sorted(each.__name__ for each in kinds))
            raise CtxError(
                f"{key} is {value!r}, not of type {wanted}.", location=self.place(given, key), hint="mend it."
            )
        return value


def _as_float(value: int | str) -> Any:
    """The number; YAML takes 1e-4 for a text."""
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value
