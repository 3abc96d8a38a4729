r"""Compare fine-tuning methods for one checkpoint and one task over several seeds: metric of the task, pretraining loss
after fine-tuning, and distance of the weights.

    python scripts/compare_finetuning.py --model runs/bert --finetune_recipe polarity_learning --text held_out.txt \
        --train_file train.tsv --validation_file dev.tsv --text_columns sentence \
        --methods plain 'l2: --anchor l2:weight=0.1' 'chain: --freeze chain' --output_dir runs/methods

Each run is `hf-ctxmodels finetune` followed by `evaluate forgetting`, and is printed. Finished runs are reused; a
finished run with other flags is an error. Writes methods.md (mean and standard deviation) and methods.json.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.cli_runner import run_command

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary


@dataclass
class ComparisonArguments:
    """Arguments of the comparison."""

    model: str = field(metadata={"help": "Pretrained checkpoint with its pretraining head."})
    train_file: str = field(metadata={"help": "Training examples, as in finetune."})
    validation_file: str = field(metadata={"help": "Examples for the metric of the task."})
    text: list[str] = field(metadata={"help": "Documents for the pretraining loss, as --dataset of pretrain."})
    output_dir: str = field(metadata={"help": "Output directory."})
    methods: list[str] = flag(
        (
            *("plain", "l2: --anchor l2", "chain: --freeze chain", "gradual: --freeze gradual"),
            "mixout: --anchor mixout:probability=0.5",
        ),
        "Methods to compare, each a name or `name: flags of finetune`.",
    )
    task: str = flag("sequence-classification", "Task of finetune.")
    finetune_recipe: str = flag("polarity_learning", "Recipe of finetune for all methods.")
    text_columns: str = flag("text", "Text columns.")
    train_examples: int | None = flag(None, "Train on a fixed subset of N examples.")
    flags: str = flag("", "Additional flags of finetune for all methods.")
    validation_fraction: float | None = flag(
        None, "Use only the documents of --text that pretrain holds out with this fraction."
    )
    metric: str = flag("accuracy", "Metric of the task.")
    seeds: int = flag(3, "Number of runs per method, with seeds 0, 1, ...")


def parse_methods(options: list[str]) -> dict[str, list[str]]:
    """Parse `["plain", "l2: --anchor l2"]` into `{"plain": [], "l2": ["--anchor", "l2"]}`.

    Raises:
        CtxError: A name is missing, duplicate, or not usable as a directory name.
    """
    methods: dict[str, list[str]] = {}
    for option in options:
        name, _, flags = option.partition(":")
        name = name.strip()
        if not name.replace("-", "").replace("_", "").isalnum() or name in methods:
            raise CtxError(f"{option!r} has no unique name.", location="--methods", hint="give `name: flags`.")
        methods[name] = shlex.split(flags)
    return methods


def run(arguments: ComparisonArguments, name: str, flags: list[str], seed: int) -> dict[str, float]:
    """Fine-tune with one method and seed, unless already done; returns metric, losses and distance."""
    output = Path(arguments.output_dir) / f"{name}-{seed}"
    size = () if arguments.train_examples is None else ("--train_examples", arguments.train_examples)
    _run_once(
        output / SUMMARY_FILE,
        "finetune",
        arguments.task,
        *("--recipe", arguments.finetune_recipe, "--model", arguments.model, "--seed", seed),
        *("--train_file", arguments.train_file, "--validation_file", arguments.validation_file, *size),
        *("--text_columns", arguments.text_columns, "--output_dir", output, "--overwrite", "true"),
        *shlex.split(arguments.flags),
        *flags,
    )
    file, fraction = output / "forgetting.json", arguments.validation_fraction
    _run_once(
        file,
        "evaluate",
        "forgetting",
        *("--pretrained", arguments.model, "--finetuned", output, "--text", *arguments.text),
        *(() if fraction is None else ("--validation_fraction", fraction)),
        *("--output_file", file),
    )
    forgetting = json.loads(file.read_text(encoding="utf-8"))
    metrics = TrainingSummary.load(output).metrics
    if f"eval_{arguments.metric}" not in metrics:
        names = ", ".join(name.removeprefix("eval_") for name in metrics if name.startswith("eval_"))
        raise CtxError(
            f"The task has no metric {arguments.metric!r}.",
            location=f"--metric {arguments.metric}",
            hint=f"use one of {names}.",
        )
    return {
        arguments.metric: metrics[f"eval_{arguments.metric}"],
        "loss before": forgetting["before"]["eval_loss"],
        "loss after": forgetting["after"]["eval_loss"],
        "distance": forgetting["distances"]["all"]["distance"],
    }


def _run_once(result: Path, command: str, *flags: object) -> None:
    """Run a command that writes a file, unless the same command line has written it before.

    Raises:
        CtxError: The file was written by another command line.
    """
    record, line = result.parent / f"{result.stem}.command", shlex.join([command, *map(str, flags)]) + "\n"
    if not result.exists():
        run_command(command, *flags)
        with wrap_write_errors(record):
            record.write_text(line, encoding="utf-8")
        return
    recorded_line = record.read_text(encoding="utf-8") if record.exists() else "an unknown command\n"
    if recorded_line != line:
        raise CtxError(
            f"This file was written by another command line: {recorded_line.strip()}.",
            location=str(result),
            hint=f"give another --output_dir or delete {result.parent}.",
        )


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Format the results as Markdown: one row per method, with mean and standard deviation over seeds."""
    columns = list(next(iter(results.values()))[0])
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, runs in results.items():
        cells = []
        for column in columns:
            values = [run[column] for run in runs]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 and column != "loss before" else ""
            cells.append(f"{mean(values):.4f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all methods; write and print the table."""
    (arguments,) = parse_arguments(ComparisonArguments, description=__doc__)
    methods, output = parse_methods(arguments.methods), Path(arguments.output_dir)
    if arguments.seeds < 1 or not methods:
        raise CtxError(
            "The comparison needs at least one seed and one method.",
            location="--seeds, --methods",
            hint="give 1 or more of each.",
        )
    results = {
        name: [run(arguments, name, flags, seed) for seed in range(arguments.seeds)] for name, flags in methods.items()
    }
    content: dict[str, Any] = {"methods": methods, "results": results}
    with wrap_write_errors(output):
        (output / "methods.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (output / "methods.md").write_text(table(results) + "\n", encoding="utf-8")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    run_script(main)
