"""The training log: progress bar, log file, experiment trackers, and the plot of the losses."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.json_parsing import matches_type
from hf_ctxmodels.core.output_files import wrap_write_errors

LOG_FILE = "training_log.jsonl"


def read_log(output_dir: str | Path, up_to_step: float = float("inf")) -> list[dict[str, float]]:
    """The records of `training_log.jsonl` up to and including a step; damaged lines are ignored."""
    file = Path(output_dir) / LOG_FILE
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if matches_type(record, dict[str, float]) and record.get("step", float("inf")) <= up_to_step:
            records.append(record)
    return records


class TrainingLog:
    """Prints and records training on the main process.

    A terminal shows a progress bar with the loss, non-padding tokens per second (of the last interval, and of the run)
    and the remaining time; otherwise each record is one line. All records are written to `training_log.jsonl` and to
    the trackers.

    Args:
        accelerator: The run's Accelerator.
        output_dir: Directory of the log file.
        total_steps: Optimizer steps of the run.
        start_step: Completed steps; later records of an earlier run are removed.
        title: Description of what is trained, for the first line.

    Attributes:
        curve: All records of the run.
    """

    def __init__(
        self, accelerator: Accelerator, output_dir: str, total_steps: int, start_step: int, title: str
    ) -> None:
        self._accelerator = accelerator
        self._is_main = accelerator.is_main_process
        self._file = Path(output_dir) / LOG_FILE
        self.curve = read_log(output_dir, start_step) if start_step else []
        if self._is_main:
            # after a crash the log may be ahead of the checkpoint
            temporary = self._file.with_name(LOG_FILE + ".writing")
            with wrap_write_errors(self._file):
                temporary.write_text("".join(json.dumps(record) + "\n" for record in self.curve), encoding="utf-8")
                os.replace(temporary, self._file)
        print_status(
            f"training {title}: steps {start_step + 1} to {total_steps}, on {accelerator.device}", self._is_main
        )
        # `disable=None` shows no bar if stderr is not a terminal
        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", disable=None if self._is_main else True, smoothing=0.05
        )
        self._bar.set_postfix_str("first step")  # which may take long: workers start, kernels are compiled

    def advance(self) -> None:
        """Count a step."""
        self._bar.update()

    def record(self, step: int, values: dict[str, float], run_rate: float | None = None) -> None:
        """Log values of a step, and show `run_rate`, the tokens per second of the run so far."""
        record = {"step": step, **values}
        self.curve.append(record)
        if not self._is_main:
            return
        with wrap_write_errors(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._bar.disable:
            entries = record if run_rate is None else {**record, "run_tokens_per_second": run_rate}
            print("  ".join(f"{name} {value:.6g}" for name, value in entries.items()), file=sys.stderr, flush=True)
        elif "loss" in values:
            rates = f"{values['tokens_per_second']:,.0f} tokens/s, {run_rate or 0:,.0f} in the run"
            self._bar.set_postfix_str(f"loss {values['loss']:.4g}, {rates}")
        else:
            print_status("  ".join(f"{name} {value:.6g}" for name, value in record.items()))
        self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class Stopwatch:
    """Seconds of training, without evaluation and saving."""

    def __init__(self) -> None:
        self._start: float | None = None
        self.seconds = 0.0

    def start(self) -> None:
        """Start or continue."""
        self._start = time.perf_counter()

    def pause(self) -> None:
        """Add the seconds since the last start to `seconds`."""
        if self._start is not None:
            self.seconds += time.perf_counter() - self._start
        self._start = None


def plot_losses(
    curve: Sequence[dict[str, float]], file: Path, baselines: Mapping[str, float] = MappingProxyType({})
) -> bool:
    """Plot the losses of a training log; returns False if matplotlib is not installed.

    Args:
        curve: Records with "step" and entries named "loss" or "..._loss".
        file: The PNG file.
        baselines: Loss -> frequency baseline on held-out text, drawn as a horizontal line.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)")
    names = dict.fromkeys(name for record in curve for name in record if name == "loss" or name.endswith("_loss"))
    # a training loss and its held-out loss have one colour
    terms = dict.fromkeys(name.removeprefix("eval_") for name in names)
    colours = {term: f"C{number}" for number, term in enumerate(terms)}
    for name in names:
        points = [(record["step"], record[name]) for record in curve if name in record]
        style: dict[str, Any] = {"marker": "o", "linestyle": "--"} if name.startswith("eval_") else {}
        axes.plot(*zip(*points, strict=True), label=name, color=colours[name.removeprefix("eval_")], **style)
    for term in [term for term in colours if term in baselines]:
        axes.axhline(baselines[term], label=f"{term}, by frequency", color=colours[term], linestyle=":")
    if names:
        figure.legend(loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True
