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
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import get_type_hints

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import join_choice
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.core.yaml_mapping import YamlMapping
from hf_ctxmodels.data.files import split_dataset_options
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


def read_task_list(
    file: str | Path, defaults: TaskArguments, folder: str | Path | None = None, only: Sequence[str] = ()
) -> TaskList:
    """Read a task list from a YAML file; the module's docstring has an example.

    Args:
        defaults: Default columns and maximum length of the tasks.
        folder: Base directory of relative paths; None for the file's `folder`, or the current directory.
        only: Names of the tasks to read, whose files must exist; empty for all.

    Raises:
        CtxError: The file cannot be read, or a key or value is invalid; the message names file, line and key.
    """
    if not Path(file).is_file():
        raise CtxError(
            "There is no such task list.",
            location=str(file),
            hint="use the path of a YAML file, or the name of a task list that `hf-ctxmodels recipes` shows.",
        )
    entries = YamlMapping.from_file(file, "task list", ("tasks", "sampling", "temperature", "folder"))
    base_folder = Path(folder if folder is not None else entries.value("folder", str, "."))
    tasks = entries.mapping("tasks", "`tasks`") if "tasks" in entries.nodes else None
    if tasks is None or not tasks.nodes:
        raise CtxError("The task list is empty.", location=str(file), hint="write tasks: and a name for each below it.")
    argument_names = {name for kind in KINDS for name in TASKS[kind].argument_names}
    check_unused_arguments(defaults, argument_names, "No task of a task list uses it.")
    if unknown := [name for name in only if name not in tasks.nodes]:
        hint = f"use {', '.join(tasks.nodes)}."
        raise CtxError(f"The list has no task {unknown[0]}.", location=f"--only {unknown[0]}", hint=hint)
    listed = []
    for name in [name for name in tasks.nodes if not only or name in only]:
        entry = tasks.mapping(name, f"the task {name}", _TASK_KEYS | _COLUMNS)
        listed.append(_parse_task(entry, name, tasks.location(name, "task "), defaults, base_folder))
    has_temperature = "temperature" in entries.nodes
    sampling = entries.value("sampling", str, "temperature" if has_temperature else "proportional")
    if sampling not in SAMPLINGS or (sampling == "temperature") != has_temperature:
        raise entries.error(
            "sampling" if "sampling" in entries.nodes else "temperature",
            f"sampling is {sampling!r}" + (" with a temperature." if has_temperature else "."),
            f"use one of {', '.join(SAMPLINGS)}; `temperature: 2` is valid only with sampling: temperature.",
        )
    temperature = entries.value("temperature", float, 1.0)
    if not temperature > 0:
        message = f"temperature is {temperature}, expected a value above 0."
        raise entries.error("temperature", message, "use 2, for example.")
    return TaskList(tuple(listed), sampling, temperature)


def _parse_task(entry: YamlMapping, name: str, location: str, defaults: TaskArguments, folder: Path) -> ListedTask:
    entry.require("kind", "train_file", "validation_file")
    hints = get_type_hints(ListedTask) | get_type_hints(TaskArguments)
    values = {key: entry.value(key, hints[key]) for key in entry.nodes}
    if values["kind"] not in KINDS:
        message = f"The task {name} has the unknown kind {values['kind']!r}."
        raise entry.error("kind", message, f"use one of {', '.join(KINDS)}.")
    for key, maximum in (("weight", math.inf), ("head_dropout", 1), ("answer_steps", 100), ("answer_dropout", 1)):
        value = values.get(key)
        if value is not None and not (0 <= value <= maximum and (value or key != "weight")):
            message = f"{key} is {value}, expected {'above 0' if key == 'weight' else f'0 to {maximum}'}."
            raise entry.error(key, message, "correct the value.")
    for key in ("train_file", "validation_file"):
        source, options = split_dataset_options(values[key])
        path = folder / local_path(source)
        if source != "demo" and not is_url(source) and (path.exists() or not options):  # else it is a Hub id
            values[key] = join_choice(str(path), options)
            if not path.exists():
                message = f"The task {name} has no such file: {values[key]}."
                raise entry.error(key, message, "correct the path, or pass its base directory as --tasks_folder.")
    columns = {key: values.pop(key) for key in entry.nodes if key in _COLUMNS}
    if unused := [key for key in columns if key not in TASKS[values["kind"]].argument_names]:
        message = f"A task of the kind {values['kind']} does not read {unused[0]}."
        raise entry.error(unused[0], message, "remove the line.")
    return ListedTask(name=name, location=location, arguments=replace(defaults, **columns), **values)
