"""List the packaged recipes, tasks, prompts, behavioral tests, comparisons and configurations for `accelerate launch`.

hf-ctxmodels pretrain --recipe NAME ...
accelerate launch --config_file FILE -m hf_ctxmodels pretrain --recipe NAME ...
"""

import re
import textwrap
from pathlib import Path

from hf_ctxmodels.core.command_line import packaged_folder, parse_arguments


def main() -> None:
    """Print a line for each file."""
    parse_arguments(description=__doc__)
    recipes, tasks, texts, suites, prompts, plans = map(
        packaged_folder, ("recipes", "tasks", "text2text", "behavior", "prompts", "comparisons")
    )
    lines = [f"Recipes, by name (--recipe NAME), in {recipes}:"]
    lines += [_summary_line(path) for path in sorted(recipes.glob("*.yaml"))]
    lines += ["", f"Lists of tasks, by name (finetune multitask --tasks NAME --tasks_folder DATA), in {tasks}:"]
    lines += [_summary_line(path) for path in sorted(tasks.glob("*.yaml"))]
    lines += ["", f"Tasks as text, by name of the file or of one of its tasks, in {texts}:"]
    lines += [_summary_line(path) for path in sorted(texts.glob("*.yaml"))]
    lines += ["", f"Behavioral tests, by name (analyze behavior --suite NAME), in {suites}:"]
    lines += [_summary_line(path) for path in sorted(suites.glob("*.yaml"))]
    lines += ["", f"Prompt tasks, by name (evaluate prompts --task NAME --tasks_folder DATA), in {prompts}:"]
    lines += [_summary_line(path) for path in sorted(prompts.glob("*.yaml"))]
    lines += ["", f"Plans of comparisons, by name (compare NAME --data_dir DATA), in {plans}:"]
    lines += [_summary_line(path) for path in sorted(plans.glob("*.yaml"))]
    lines += ["", "Configurations for several processes (accelerate launch --config_file FILE -m hf_ctxmodels ...):"]
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
