r"""Compare families under equal conditions: pretrain each of them on one text with one budget, evaluate checkpoints
with the same measures, and write tables and figures.

    hf-ctxmodels compare tiny --data_dir data --output_dir runs/comparison
    hf-ctxmodels compare my_plan.yaml --output_dir runs/comparison --dry_run

The plan is a YAML file, or the name of a packaged one. After an interruption, the same command continues; finished
parts are skipped. Several processes, also on different machines, can share the output directory.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from transformers.utils import logging

from hf_ctxmodels.comparison.plan import read_plan
from hf_ctxmodels.comparison.processes import TimeIsUpError
from hf_ctxmodels.comparison.results import REPORT_FILE, RESULTS_FILE, TABLE_FILE, write_results
from hf_ctxmodels.comparison.runner import MINUTE, Comparison, collected_errors
from hf_ctxmodels.core.command_line import parse_arguments, with_first_flag
from hf_ctxmodels.core.console import print_status, stop_signals
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import require_writable


@dataclass
class CompareArguments:
    """Plan and output."""

    plan: str = flag(REQUIRED, "YAML file or name of a packaged plan; the flag can be left out if it comes first.")
    output_dir: str = flag(REQUIRED, "Directory for models, results and tables.")
    data_dir: str = flag(".", "Directory that relative paths of the plan refer to.")
    only: list[str] = flag((), "Run only these variants of the plan.")
    seeds: list[int] = flag((), "Run only these seeds of the plan.")
    max_minutes: float | None = flag(
        None, "Stop after this many minutes; the same command continues.", conflicts=("dry_run",)
    )
    dry_run: bool = flag(
        False, "Print the runs and the estimated duration of pretraining, from a minute of training of each variant."
    )

    def __post_init__(self) -> None:
        check_range(self, "max_minutes", above=0)


def main() -> None:
    """Run the plan, and print the tables."""
    argv = with_first_flag(sys.argv[1:], "plan")
    arguments, placement = parse_arguments(
        CompareArguments,
        (DeviceArguments, ["device"]),
        description=__doc__,
        argv=argv,
        essential=("plan", "output_dir"),
    )
    if not hasattr(os, "wait4"):
        raise CtxError(
            "This command measures and stops processes with functions that Windows does not have.",
            location="compare",
            hint="use Linux, macOS or the Windows Subsystem for Linux.",
        )
    require_writable(arguments.output_dir, "--output_dir")
    logging.disable_progress_bar()  # of loading each checkpoint
    for number in stop_signals():  # and stop training, see `run_command`
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda received, frame: sys.exit(128 + received))
    plan = read_plan(arguments.plan, arguments.data_dir)
    deadline = None if arguments.max_minutes is None else time.monotonic() + 60 * arguments.max_minutes
    timing_seconds = MINUTE if arguments.dry_run else 0.0
    print_status("checking the files of the measures")
    plan.check_measures()
    comparison = Comparison(
        plan,
        Path(arguments.output_dir),
        only=arguments.only or None,
        seeds=arguments.seeds or None,
        deadline=deadline,
        timing_seconds=timing_seconds,
        device=placement.device,
    )
    for family, reason in plan.excluded.items():
        print(f"excluded: {family}, since {reason}")
    if arguments.dry_run:
        print_dry_run(comparison)
        return
    errors: list[CtxError] = []
    try:
        errors = comparison.run(lambda: write_results(comparison))
    except TimeIsUpError:
        print_status(f"stopped after {arguments.max_minutes:g} minutes; the same command continues")
    results = write_results(comparison)
    for result in results:
        for table in result.tables:
            print(f"{table.title}\n\n{table.markdown()}\n")
    print(f"{RESULTS_FILE}, {TABLE_FILE}, {REPORT_FILE} and figures in {arguments.output_dir}")
    _raise_first("runs", errors)


def _raise_first(description: str, errors: Sequence[CtxError]) -> None:
    """Raise the first of several errors, if any, with their number."""
    if errors:
        first = errors[0]
        message = f"Failed {description}: {len(errors)}. The first error: {first.message}"
        raise CtxError(message, location=first.location, hint=first.hint)


def print_dry_run(comparison: Comparison) -> None:
    """Measure each variant, and print the size and duration of its runs; raises CtxError afterwards if some failed."""
    total = 0.0
    errors: dict[str, CtxError] = {}  # by variant
    names = ("run", "parameters", "steps", "words", "duration")
    print("{:<28}{:>14}{:>12}{:>16}{:>12}".format(*names))
    for run in comparison.selected_runs():
        name = run.variant.name
        if name in errors:
            continue
        with collected_errors(errors, name):
            size = comparison.size(run.variant)
            steps = comparison.total_steps(run, size)
            seconds = steps * size.seconds_per_step
            total += seconds
            print(
                f"{f'{name}, {run.budget}, seed {run.seed}':<28}{size.parameters:>14,}{steps:>12,}"
                f"{round(steps * size.words_per_step):>16,}{timedelta(seconds=round(seconds))!s:>12}"
            )
    _raise_first("variants", [*errors.values()])
    num_checkpoints = comparison.plan.checkpoints + 1
    measures = ", ".join(measure.name for measure in comparison.plan.measures)
    print(
        f"pretraining: {timedelta(seconds=round(total))}; then {measures} of up to {num_checkpoints} checkpoints a run"
    )
