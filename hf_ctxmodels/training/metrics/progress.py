"""Progress bar, log file and experiment trackers of a run."""

import json
import os
import sys
import time
from pathlib import Path

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


class Progress:
    """Shows and records training on the main process.

    First comes a line with what is trained. A terminal shows a bar with loss, non-padding tokens per second (of the
    last interval, and of the run) and remaining time; otherwise each record is one line. All records go to
    `training_log.jsonl` and to the trackers.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str, total_steps: int, start_step: int, what: str) -> None:
        self._accelerator = accelerator
        self._main = accelerator.is_main_process
        self._file = Path(output_dir) / LOG_FILE
        self.curve = read_log(output_dir, start_step) if start_step else []
        if self._main:
            # after a crash the log may be ahead of the checkpoint
            temporary = self._file.with_name(LOG_FILE + ".writing")
            with wrap_write_errors(self._file):
                temporary.write_text("".join(json.dumps(record) + "\n" for record in self.curve), encoding="utf-8")
                os.replace(temporary, self._file)
        print_status(f"training {what}: steps {start_step + 1} to {total_steps}, on {accelerator.device}", self._main)
        # `disable=None` shows no bar if stderr is no terminal
        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", disable=None if self._main else True, smoothing=0.05
        )
        self._bar.set_postfix_str("first step")  # which may take long: workers start, kernels are compiled

    def advance(self) -> None:
        """Count a step."""
        self._bar.update()

    def record(self, step: int, values: dict[str, float], run_rate: float | None = None) -> None:
        """Log named values of a step, and show `run_rate`, the tokens per second of the run so far."""
        entry = {"step": step, **values}
        self.curve.append(entry)
        if not self._main:
            return
        with wrap_write_errors(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._bar.disable:
            shown = entry if run_rate is None else {**entry, "run_tokens_per_second": run_rate}
            print("  ".join(f"{name} {value:.6g}" for name, value in shown.items()), file=sys.stderr, flush=True)
        elif "loss" in values:
            rates = f"{values['tokens_per_second']:,.0f} tokens/s, {run_rate or 0:,.0f} in the run"
            self._bar.set_postfix_str(f"loss {values['loss']:.4g}, {rates}")
        else:
            print_status("  ".join(f"{name} {value:.6g}" for name, value in entry.items()))
        self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class Stopwatch:
    """Seconds of training, without evaluation and saving."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.seconds = 0.0

    def start(self) -> None:
        """Start or continue."""
        self._since = time.perf_counter()

    def pause(self) -> float:
        """Stop, and return the seconds since the last start."""
        lap = time.perf_counter() - self._since if self._since is not None else 0.0
        self._since = None
        self.seconds += lap
        return lap
