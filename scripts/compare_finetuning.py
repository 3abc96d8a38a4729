r"""Compare ways to fine-tune one checkpoint on one task: the task's score, the pretraining loss afterwards, and how far
the weights moved, over seeds.

    python scripts/compare_finetuning.py --model runs/bert --recipe_of_finetune polarity_learning --text held_out.txt \
        --train_file train.tsv --validation_file dev.tsv --text_columns sentence \
        --ways plain 'l2: --anchor l2:weight=0.1' 'chain: --freeze chain' --output_dir runs/ways

Every run is `hf-ctxmodels finetune`, then `evaluate forgetting`, and printed. Runs that are finished are used again;
those of other flags are an error. Leaves ways.md, a table with mean and standard deviation, and ways.json.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.stages import run_stage

from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.training.metrics.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ComparisonArguments:
    """Which checkpoint, task and ways."""

    model: str = field(metadata={"help": "Checkpoint that pretraining left, with its head."})
    train_file: str = field(metadata={"help": "Training examples, as finetune takes them."})
    validation_file: str = field(metadata={"help": "Examples that the score is measured on."})
    text: list[str] = field(metadata={"help": "Documents of the pretraining loss, as --dataset of pretrain."})
    output_dir: str = field(metadata={"help": "Directory for everything that is made."})
    ways: list[str] = flag(
        ("plain", "l2: --anchor l2", "chain: --freeze chain", "gradual: --freeze gradual", "mixout: --mixout 0.5"),
        "Ways to compare, each a name, or `name: flags of finetune`.",
    )
    recipe_of_finetune: str = flag("polarity_learning", "Recipe of finetune that all ways share.")
    text_columns: str = flag("text", "Columns of the texts.")
    train_examples: int | None = flag(None, "Train on a sample of so many examples.")
    flags: str = flag("", "Further flags of finetune, for all ways.")
    validation_fraction: float | None = flag(None, "Read only the documents of --text that pretrain holds out.")
    metric: str = flag("accuracy", "The task's metric.")
    seeds: int = flag(3, "Runs of each way, with the seeds 0, 1, ...")


def read_ways(texts: list[str]) -> dict[str, list[str]]:
    """`["plain", "l2: --anchor l2"]` as `{"plain": [], "l2": ["--anchor", "l2"]}`.

    Raises:
        CtxError: A name is missing, is no name of a directory, or is given twice.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, flags = text.partition(":")
        if not name.strip().replace("-", "").replace("_", "").isalnum() or name.strip() in found:
            raise CtxError(f"{text!r} has no name of its own.", location="--ways", hint="give `name: flags`.")
        found[name.strip()] = shlex.split(flags)
    return found


def run(arguments: ComparisonArguments, name: str, flags: list[str], seed: int) -> dict[str, float]:
    """Fine-tune in one way with one seed, unless that is done; gives score, loss and distance."""
    output = Path(arguments.output_dir) / f"{name}-{seed}"
    size = () if arguments.train_examples is None else ("--train_examples", arguments.train_examples)
    _run_once(
        output / SUMMARY_FILE,
        "finetune",
        "sequence-classification",
        *("--recipe", arguments.recipe_of_finetune, "--model", arguments.model, "--seed", seed),
        *("--train_file", arguments.train_file, "--validation_file", arguments.validation_file, *size),
        *("--text_columns", arguments.text_columns, "--output_dir", output, "--overwrite", "true"),
        *shlex.split(arguments.flags),
        *flags,
    )
    file, share = output / "forgetting.json", arguments.validation_fraction
    _run_once(
        file,
        "evaluate",
        "forgetting",
        *("--pretrained", arguments.model, "--finetuned", output, "--text", *arguments.text),
        *(() if share is None else ("--validation_fraction", share)),
        *("--output_file", file),
    )
    forgetting = json.loads(file.read_text(encoding="utf-8"))
    metrics = TrainingSummary.load(output).metrics
    if f"eval_{arguments.metric}" not in metrics:
        raise CtxError(
            f"The task has no metric {arguments.metric!r}.",
            location=f"--metric {arguments.metric}",
            hint=f"use one of {', '.join(each.removeprefix('eval_') for each in metrics if each.startswith('eval_'))}.",
        )
    return {
        arguments.metric: metrics[f"eval_{arguments.metric}"],
        "loss before": forgetting["before"]["eval_loss"],
        "loss after": forgetting["after"]["eval_loss"],
        "distance": forgetting["distances"]["encoder"]["distance"],
    }


def _run_once(result: Path, command: str, *flags: object) -> None:
    """Run a command that leaves a file, unless the same command line has left it.

    Raises:
        CtxError: Another command line has.
    """
    record, line = result.parent / f"{result.stem}.command", shlex.join([command, *map(str, flags)]) + "\n"
    if not result.exists():
        run_stage(command, *flags)
        with wrap_write_errors(record):
            record.write_text(line, encoding="utf-8")
        return
    known = record.read_text(encoding="utf-8") if record.exists() else "an unknown one\n"
    if known != line:
        raise CtxError(
            f"This result was made by another command line, {known.strip()}.",
            location=str(result),
            hint=f"give another --output_dir, or delete {result.parent}.",
        )


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """The Markdown table: a row for each way, with mean and standard deviation over seeds."""
    columns = list(next(iter(results.values()))[0])
    lines = ["| way | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, runs in results.items():
        cells = []
        for column in columns:
            values = [each[column] for each in runs]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 and column != "loss before" else ""
            cells.append(f"{mean(values):.4f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run everything; write and print the table."""
    (arguments,) = parse_arguments(ComparisonArguments, description=__doc__)
    ways, output = read_ways(arguments.ways), Path(arguments.output_dir)
    if arguments.seeds < 1 or not ways:
        raise CtxError("Nothing is to be compared.", location="--seeds, --ways", hint="give 1 or more of either.")
    results = {
        name: [run(arguments, name, flags, seed) for seed in range(arguments.seeds)] for name, flags in ways.items()
    }
    found: dict[str, Any] = {"ways": ways, "results": results}
    with wrap_write_errors(output):
        (output / "ways.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (output / "ways.md").write_text(table(results) + "\n", encoding="utf-8")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    run_script(main)
