"""List the packaged recipes, tasks, prompts, behavioral tests, comparisons and configurations for `accelerate launch`.

hf-ctxmodels pretrain --recipe NAME ...
accelerate launch --config_file FILE -m hf_ctxmodels pretrain --recipe NAME ...
"""

import re
import textwrap
from pathlib import Path

from hf_ctxmodels.core.command_line import packaged_folder, parse_arguments

SECTIONS = {
    "recipes": "Recipes, by name (--recipe NAME)",
    "tasks": "Lists of tasks, by name (finetune multitask --tasks NAME --tasks_folder DATA)",
    "text2text": "Tasks as text, by name of the file or of one of its tasks",
    "behavior": "Behavioral tests, by name (analyze behavior --suite NAME)",
    "prompts": "Prompt tasks, by name (evaluate prompts --task NAME --tasks_folder DATA)",
    "comparisons": "Plans of comparisons, by name (compare NAME --data_dir DATA)",
}
"""Folder of packaged files -> their title."""


def main() -> None:
    """Print a line for each file."""
    parse_arguments(description=__doc__)
    lines: list[str] = []
    for folder_name, title in SECTIONS.items():
        folder = packaged_folder(folder_name)
        lines += [f"{title}, in {folder}:", *map(_summary_line, sorted(folder.glob("*.yaml"))), ""]
    lines += ["Configurations for several processes (accelerate launch --config_file FILE -m hf_ctxmodels ...):"]
    lines += [
        f"  {path}\n      {first_sentence(path)}" for path in sorted(packaged_folder("accelerate").glob("*.yaml"))
    ]
    print("\n".join(lines))


def _summary_line(path: Path) -> str:
    return textwrap.fill(f"  {path.stem:<25} {first_sentence(path)}", 110, subsequent_indent=" " * 28)


def first_sentence(path: Path) -> str:
    """The first sentence of the comment at the top of a file, up to the command that the comment shows."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line.removeprefix("# ").strip())
    return re.split(r"(?<!et al)\. |[.:]$", " ".join(lines))[0] + "."
