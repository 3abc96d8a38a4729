"""Task lists for multi-task learning: a YAML file with the tasks' kinds, files and arguments.

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
from hf_ctxmodels.downstream.tasks.base import Task, TaskArguments, check_unused_arguments

SAMPLINGS = ("proportional", "temperature", "annealed")
KINDS = tuple(name for name, task in TASKS.items() if not task.is_generative)


@dataclass(frozen=True)
class ListedTask:
    """A task of a task list.

    Attributes:
        name: Name of the task.
        kind: A key of `TASKS`.
        train_file, validation_file: See `hf-ctxmodels finetune`.
        weight: Factor of the training loss.
        head_dropout: Dropout rate before the head; None for the model's.
        answer_steps: Steps of an answer network for pairs (`heads.answer_network`); 0 for a linear classifier.
        answer_dropout: Rate of dropping steps of the answer network in training; None for the model's.
        metric: Main metric, which is averaged over the tasks; None for the first metric of the kind.
        location: Location in the file, for error messages.
        arguments: Columns and maximum length.
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
    location: str = ""
    arguments: TaskArguments = field(default_factory=TaskArguments)

    def make(self) -> Task[Any]:
        """The task."""
        return TASKS[self.kind](self.arguments)


@dataclass(frozen=True)
class TaskList:
    """The content of a task list.

    Attributes:
        tasks: The tasks in file order.
        sampling: "proportional": all batches of all tasks, shuffled (MT-DNN); "temperature": the task of a step is
            sampled with probability proportional to n^(1/temperature) for n batches; "annealed": as "temperature", with
            an exponent that decreases from 1 to 0.2 over the epochs.
        temperature: Temperature of the sampling.
    """

    tasks: tuple[ListedTask, ...]
    sampling: str = "proportional"
    temperature: float = 1.0


_LIST_KEYS = ("tasks", "sampling", "temperature", "folder")
_TASK_KEYS = tuple(f.name for f in fields(ListedTask) if f.name not in ("name", "location", "arguments"))
_COLUMNS = tuple(f.name for f in fields(TaskArguments))


def read_task_list(file: str | Path, defaults: TaskArguments, folder: str | Path | None = None) -> TaskList:
    """Read a task list from a YAML file; the module's docstring has an example.

    Args:
        file: The file.
        defaults: Default columns and maximum length of the tasks.
        folder: Base directory of relative paths; None for the file's `folder`, or the current directory.

    Raises:
        CtxError: The file cannot be read, or a key or value is invalid; the message names file, line and key.
    """
    reader = _YamlReader(file)
    entries = reader.mapping(reader.root, "the file")
    reader.check_keys(entries, _LIST_KEYS, "a task list")
    root = Path(folder if folder is not None else reader.value(entries, "folder", str, "."))
    task_entries = reader.mapping(entries["tasks"][1], "`tasks`") if "tasks" in entries else {}
    if not task_entries:
        raise CtxError("The task list is empty.", location=str(file), hint="write tasks: and a name for each below it.")
    argument_names = {name for kind in KINDS for name in TASKS[kind].argument_names}
    check_unused_arguments(defaults, argument_names, "No task of a task list uses it.")
    tasks = tuple(_parse_task(reader, name, *entry, defaults, root) for name, entry in task_entries.items())
    sampling = reader.value(entries, "sampling", str, "temperature" if "temperature" in entries else "proportional")
    if sampling not in SAMPLINGS or (sampling == "temperature") != ("temperature" in entries):
        raise CtxError(
            f"sampling is {sampling!r}" + (" with a temperature." if "temperature" in entries else "."),
            location=reader.location(entries, "sampling" if "sampling" in entries else "temperature"),
            hint=f"use one of {', '.join(SAMPLINGS)}; `temperature: 2` is valid only with sampling: temperature.",
        )
    temperature = reader.value(entries, "temperature", float, 1.0)
    if not temperature > 0:
        raise CtxError(
            f"temperature is {temperature}, expected a value above 0.",
            location=reader.location(entries, "temperature"),
            hint="use 2, for example.",
        )
    return TaskList(tasks, sampling, temperature)


def _parse_task(
    reader: "_YamlReader", name: str, line: int, node: yaml.Node, defaults: TaskArguments, root: Path
) -> ListedTask:
    location = f"{reader.file}:{line}, task {name}"
    entry = reader.mapping(node, f"the task {name}")
    reader.check_keys(entry, (*_TASK_KEYS, *_COLUMNS), f"the task {name}")
    if missing := [key for key in ("kind", "train_file", "validation_file") if key not in entry]:
        raise CtxError(f"The task {name} has no {' and no '.join(missing)}.", location=location, hint="add it.")
    hints = get_type_hints(ListedTask) | get_type_hints(TaskArguments)
    values = {key: reader.value(entry, key, hints[key]) for key in entry}
    if values["kind"] not in KINDS:
        raise CtxError(
            f"The task {name} has the unknown kind {values['kind']!r}.",
            location=reader.location(entry, "kind"),
            hint=f"use one of {', '.join(KINDS)}.",
        )
    for key, maximum in (("weight", math.inf), ("head_dropout", 1), ("answer_steps", 100), ("answer_dropout", 1)):
        value = values.get(key)
        if value is not None and not (0 <= value <= maximum and (value or key != "weight")):
            raise CtxError(
                f"{key} is {value}, expected {'above 0' if key == 'weight' else f'0 to {maximum}'}.",
                location=reader.location(entry, key),
                hint="correct the value.",
            )
    for key in ("train_file", "validation_file"):
        if values[key] != "demo":
            values[key] = str(root / values[key])
        if values[key] != "demo" and not Path(values[key]).is_file():
            raise CtxError(
                f"The task {name} has no such file: {values[key]}.",
                location=reader.location(entry, key),
                hint="correct the path, or pass its base directory as --tasks_folder.",
            )
    if unused := [key for key in entry if key in _COLUMNS and key not in TASKS[values["kind"]].argument_names]:
        raise CtxError(
            f"A task of the kind {values['kind']} does not read {unused[0]}.",
            location=reader.location(entry, unused[0]),
            hint="remove the line.",
        )
    columns = replace(defaults, **{key: values.pop(key) for key in _COLUMNS if key in values})
    return ListedTask(name=name, location=location, arguments=columns, **values)


class _YamlReader:
    """Reads a YAML file as nodes, so that errors name lines."""

    def __init__(self, file: str | Path) -> None:
        self.file = file
        if not Path(file).is_file():
            raise CtxError(
                "There is no such task list.",
                location=str(file),
                hint="use the path of a YAML file, or the name of a task list that `hf-ctxmodels recipes` shows.",
            )
        try:
            root = yaml.compose(read_text(file), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            raise CtxError(
                f"The task list is not valid YAML: {error}.", location=str(file), hint="see the example."
            ) from error
        if root is None:
            raise CtxError("The task list file is empty.", location=str(file), hint="see the example.")
        self.root = root

    def mapping(self, node: yaml.Node, description: str) -> dict[str, tuple[int, yaml.Node]]:
        """Key -> line and node of its value; raises CtxError if the node is not a mapping, or a key occurs twice."""
        if not isinstance(node, yaml.MappingNode):
            raise CtxError(
                f"Expected keys and values in {description}.",
                location=f"{self.file}:{node.start_mark.line + 1}",
                hint="key: value",
            )
        entries: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in entries:
                raise CtxError(
                    f"{key.value!r} occurs twice in {description}, first in line {entries[key.value][0]}.",
                    location=f"{self.file}:{line}",
                    hint="remove one of them.",
                )
            entries[key.value] = (line, value)
        return entries

    def check_keys(self, entries: Mapping[str, tuple[int, Any]], allowed: tuple[str, ...], description: str) -> None:
        """Raise CtxError for an unknown key."""
        for key in entries:
            if key not in allowed:
                matches = difflib.get_close_matches(key, allowed, n=1)
                raise CtxError(
                    f"Unknown key {key!r} in {description}.",
                    location=self.location(entries, key),
                    hint=(f"did you mean {matches[0]}? " if matches else "") + f"Use one of {', '.join(allowed)}.",
                )

    def location(self, entries: Mapping[str, tuple[int, Any]], key: str) -> str:
        """`file:line, key` of a key."""
        return f"{self.file}:{entries[key][0]}, {key}"

    def value(self, entries: Mapping[str, tuple[int, yaml.Node]], key: str, hint: Any, default: Any = None) -> Any:
        """The value of a key, converted to a type; raises CtxError if it has another type."""
        if key not in entries:
            return default
        node = entries[key][1]
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        types = {type_ for type_ in getattr(hint, "__args__", (hint,)) if type_ is not type(None)}
        if str in types and not isinstance(value, bool) and value is not None:
            value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if float in types and isinstance(value, int | str) and not isinstance(value, bool):
            value = _as_float(value)
        if type(value) not in types and not (value is None and types != {hint}):
            type_names = " or ".join(sorted(type_.__name__ for type_ in types))
            raise CtxError(
                f"{key} is {value!r}, expected type {type_names}.",
                location=self.location(entries, key),
                hint="correct the value.",
            )
        return value


def _as_float(value: int | str) -> Any:
    """The value as a number if possible; YAML reads 1e-4 as a string."""
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value
