"""YAML files of tasks, packaged ones too: tasks as text, and tasks with prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.core.command_line import packaged_folder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.core.yaml_mapping import YamlMapping


def packaged_tasks(packaged: str = "text2text") -> dict[str, list[str]]:
    """Names of the files in a packaged folder, with the names of their tasks."""
    return {
        path.stem: list(YamlMapping.from_file(path, "file of tasks").text("tasks"))
        for path in sorted(packaged_folder(packaged).glob("*.yaml"))
    }


def find_task_file(name: str, packaged: str) -> tuple[Path, str | None]:
    """The path of a YAML file of tasks, and the name of its only selected task or None for all.

    Args:
        name: A path, or the name of a packaged file or task.
        packaged: Packaged folder: "text2text" or "prompts".

    Raises:
        CtxError: There is neither a file nor a packaged task.
    """
    if Path(name).is_file():
        return Path(name), None
    folder = packaged_folder(packaged)
    if (path := folder / f"{name.removesuffix('.yaml')}.yaml").is_file() and Path(name).name == name:
        return path, None
    tasks_by_file = packaged_tasks(packaged)
    for stem, tasks in tasks_by_file.items():
        if name in tasks:
            return folder / f"{stem}.yaml", name
    names = [*tasks_by_file, *(task for tasks in tasks_by_file.values() for task in tasks)]
    raise CtxError(
        f"There is neither a file nor a packaged task {name!r}.",
        location=name,
        hint=f"{did_you_mean(name, names)}`hf-ctxmodels recipes` lists the names.",
    )


@dataclass(frozen=True)
class TaskEntry:
    """The entry of a task in a YAML file.

    Attributes:
        mapping: Its keys and values.
        location: `file:line` of the entry.
        folder: Base directory of relative paths.
    """

    name: str
    mapping: YamlMapping
    location: str
    folder: Path


def read_entries(
    file: str | Path, folder: str | Path | None, description: str, keys: Sequence[str], name: str | None = None
) -> Iterator[TaskEntry]:
    """Yield the entries of a YAML file of tasks, or the entry `name`.

    Args:
        folder: Base directory of relative paths; None for the file's `folder`, or the current directory.
        description: Description of the file in errors.
        keys: Valid keys of an entry.

    Raises:
        CtxError: The file cannot be read, or a key is unknown; the message names file, line and key.
    """
    content = YamlMapping.from_file(file, description, ("tasks", "folder"))
    if "tasks" not in content.nodes:
        raise CtxError("The file has no tasks.", location=str(file), hint="write tasks: and a name for each below it.")
    base = Path(folder if folder is not None else content.value("folder", str, "."))
    tasks = content.mapping("tasks", "`tasks`")
    for key in tasks.nodes:
        if name in (None, key):
            yield TaskEntry(key, tasks.mapping(key, f"the task {key}", keys), tasks.location(key), base)
