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

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.tasks import TASKS
from hf_ctxmodels.downstream.tasks.base import TaskArguments, check_unused_arguments

SAMPLINGS = ("proportional", "temperature", "annealed")
KINDS = tuple(name for name, task in TASKS.items() if not task.is_generative)


@dataclass(frozen=True)
class ListedTask:
    """A task of a task list.

    Attributes:
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


@dataclass(frozen=True)
class TaskList:
    """The tasks in file order, and their sampling.

    Attributes:
        sampling: "proportional": all batches of all tasks, shuffled (MT-DNN); "temperature": the task of a step is
            sampled with probability proportional to n^(1/temperature) for n batches; "annealed": as "temperature", with
            an exponent that decreases from 1 to 0.2 over the epochs.
    """

    tasks: tuple[ListedTask, ...]
    sampling: str = "proportional"
    temperature: float = 1.0


_TASK_KEYS = {f.name for f in fields(ListedTask)} - {"name", "location", "arguments"}
_COLUMNS = {f.name for f in fields(TaskArguments)}


def read_task_list(file: str | Path, defaults: TaskArguments, folder: str | Path | None = None) -> TaskList:
    """Read a task list from a YAML file; the module's docstring has an example.

    Args:
        defaults: Default columns and maximum length of the tasks.
        folder: Base directory of relative paths; None for the file's `folder`, or the current directory.

    Raises:
        CtxError: The file cannot be read, or a key or value is invalid; the message names file, line and key.
    """
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
    entries = _Mapping(file, root, "a task list", ("tasks", "sampling", "temperature", "folder"))
    base_folder = Path(folder if folder is not None else entries.value("folder", str, "."))
    tasks = _Mapping(file, entries.nodes["tasks"], "`tasks`") if "tasks" in entries.nodes else None
    if tasks is None or not tasks.nodes:
        raise CtxError("The task list is empty.", location=str(file), hint="write tasks: and a name for each below it.")
    argument_names = {name for kind in KINDS for name in TASKS[kind].argument_names}
    check_unused_arguments(defaults, argument_names, "No task of a task list uses it.")
    listed = []
    for name, node in tasks.nodes.items():
        entry = _Mapping(file, node, f"the task {name}", _TASK_KEYS | _COLUMNS)
        listed.append(_parse_task(entry, name, tasks.location(name, "task "), defaults, base_folder))
    has_temperature = "temperature" in entries.nodes
    sampling = entries.value("sampling", str, "temperature" if has_temperature else "proportional")
    if sampling not in SAMPLINGS or (sampling == "temperature") != has_temperature:
        raise CtxError(
            f"sampling is {sampling!r}" + (" with a temperature." if has_temperature else "."),
            location=entries.location("sampling" if "sampling" in entries.nodes else "temperature"),
            hint=f"use one of {', '.join(SAMPLINGS)}; `temperature: 2` is valid only with sampling: temperature.",
        )
    temperature = entries.value("temperature", float, 1.0)
    if not temperature > 0:
        raise CtxError(
            f"temperature is {temperature}, expected a value above 0.",
            location=entries.location("temperature"),
            hint="use 2, for example.",
        )
    return TaskList(tuple(listed), sampling, temperature)


def _parse_task(entry: "_Mapping", name: str, location: str, defaults: TaskArguments, folder: Path) -> ListedTask:
    if missing := [key for key in ("kind", "train_file", "validation_file") if key not in entry.nodes]:
        raise CtxError(f"The task {name} has no {' and no '.join(missing)}.", location=location, hint="add it.")
    hints = get_type_hints(ListedTask) | get_type_hints(TaskArguments)
    values = {key: entry.value(key, hints[key]) for key in entry.nodes}
    if values["kind"] not in KINDS:
        raise CtxError(
            f"The task {name} has the unknown kind {values['kind']!r}.",
            location=entry.location("kind"),
            hint=f"use one of {', '.join(KINDS)}.",
        )
    for key, maximum in (("weight", math.inf), ("head_dropout", 1), ("answer_steps", 100), ("answer_dropout", 1)):
        value = values.get(key)
        if value is not None and not (0 <= value <= maximum and (value or key != "weight")):
            raise CtxError(
                f"{key} is {value}, expected {'above 0' if key == 'weight' else f'0 to {maximum}'}.",
                location=entry.location(key),
                hint="correct the value.",
            )
    for key in ("train_file", "validation_file"):
        if values[key] != "demo":
            values[key] = str(folder / values[key])
            if not Path(values[key]).is_file():
                raise CtxError(
                    f"The task {name} has no such file: {values[key]}.",
                    location=entry.location(key),
                    hint="correct the path, or pass its base directory as --tasks_folder.",
                )
    columns = {key: values.pop(key) for key in entry.nodes if key in _COLUMNS}
    if unused := [key for key in columns if key not in TASKS[values["kind"]].argument_names]:
        raise CtxError(
            f"A task of the kind {values['kind']} does not read {unused[0]}.",
            location=entry.location(unused[0]),
            hint="remove the line.",
        )
    return ListedTask(name=name, location=location, arguments=replace(defaults, **columns), **values)


class _Mapping:
    """A YAML mapping, whose errors name the file, line and key; `keys` are the allowed keys, or empty for any."""

    def __init__(self, file: str | Path, node: yaml.Node, description: str, keys: Collection[str] = ()) -> None:
        if not isinstance(node, yaml.MappingNode):
            raise CtxError(
                f"Expected keys and values in {description}.",
                location=f"{file}:{node.start_mark.line + 1}",
                hint="write `key: value`.",
            )
        self._file, self._lines = file, dict[str, int]()
        self.nodes: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in self.nodes:
                raise CtxError(
                    f"{key!r} occurs twice in {description}, first in line {self._lines[key]}.",
                    location=f"{file}:{line}",
                    hint="remove one of them.",
                )
            self.nodes[key], self._lines[key] = value_node, line
            if keys and key not in keys:
                raise CtxError(
                    f"Unknown key {key!r} in {description}.",
                    location=self.location(key),
                    hint=f"{did_you_mean(key, keys)}Use one of {', '.join(sorted(keys))}.",
                )

    def location(self, key: str, prefix: str = "") -> str:
        """`file:line, key` of a key."""
        return f"{self._file}:{self._lines[key]}, {prefix}{key}"

    def value(self, key: str, hint: Any, default: Any = None) -> Any:
        """The value of a key, converted to a type; raises CtxError if it has another type."""
        if key not in self.nodes:
            return default
        value = yaml.SafeLoader("").construct_object(self.nodes[key], deep=True)
        types = {type_ for type_ in getattr(hint, "__args__", (hint,)) if type_ is not type(None)}
        if str in types and not isinstance(value, bool) and value is not None:
            value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if float in types and isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                value = float(value)  # YAML reads 1e-4 as a string
        if type(value) not in types and not (value is None and types != {hint}):
            type_names = " or ".join(sorted(type_.__name__ for type_ in types))
            raise CtxError(
                f"{key} is {value!r}, expected type {type_names}.", location=self.location(key), hint="correct it."
            )
        return value
