"""The training log: scalars of each step, progress bar, log file, experiment trackers, and the plot of the losses."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from hf_ctxmodels.core.console import LINE_INTERVALS, ReportTimer, format_number, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import matches_type
from hf_ctxmodels.core.output_files import wrap_write_errors, write_text_file
from hf_ctxmodels.training.accelerator import describe_device
from hf_ctxmodels.training.checkpoint_files import list_checkpoints
from hf_ctxmodels.training.optimizers import local_shard

LOG_FILE = "training_log.jsonl"
_MAX_SHOWN_INDICES = 64
_MAX_SHOWN_METRICS = 5
_NUMERATOR, _DENOMINATOR = "|numerator", "|denominator"


class NonFiniteError(CtxError):
    """The loss or the gradient norm became infinite or NaN."""


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raise NonFiniteError if a weight is NaN or infinite, which may happen with finite gradients."""
    parameters = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        finite = torch.stack([parameter.isfinite().all() for parameter in parameters.values()]).tolist()
    non_finite = [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]
    if non_finite:
        raise NonFiniteError(
            f"{len(non_finite)} weights are not finite after step {step}, the first is {non_finite[0]}; they are not "
            "saved.",
            location=f"step {step}",
            hint="restart with a lower --learning_rate or longer --warmup_steps.",
        )


class StepMetrics:
    """Scalars of the steps since the last log record.

    Reading a scalar synchronizes with the device, so scalars are collected as tensors (`add`) and read together
    (`settle`) at logging and saving, and at least every `capacity` steps. Settled values are means over processes.
    """

    capacity = 64

    def __init__(self, accelerator: Accelerator, output_dir: str) -> None:
        self._accelerator, self._output_dir = accelerator, output_dir
        self._pending: list[tuple[int, dict[str, torch.Tensor], list[torch.Tensor]]] = []
        self._settled: list[dict[str, float]] = []

    @property
    def tokens(self) -> float:
        """Tokens of the settled steps."""
        return math.fsum(row["tokens"] for row in self._settled)

    def add(self, step: int, scalars: dict[str, torch.Tensor], example_indices: list[torch.Tensor]) -> None:
        """Add the scalars of a step: 0-dimensional tensors, or (2,) numerator and denominator of a metric, whose names
        may differ between steps, but not between processes; and the indices of the examples in each micro-batch."""
        flat: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            flat |= {name: value} if value.ndim == 0 else {name + _NUMERATOR: value[0], name + _DENOMINATOR: value[1]}
        self._pending.append((step, flat, example_indices))

    def latest(self) -> tuple[float, float]:
        """This process's mean loss of the steps that are not settled, and the tokens of all steps since the last
        record; not a collective call."""
        rows = [torch.stack([scalars["loss"].float(), scalars["tokens"].float()]) for _, scalars, _ in self._pending]
        loss, tokens = (torch.stack(rows).sum(0)).tolist()
        return loss / len(rows), tokens + self.tokens

    def settle(self, only_if_full: bool = False) -> None:
        """Read the collected scalars from the device; raises NonFiniteError if the loss of a step, or its gradient norm
        without fp16, is not finite."""
        if len(self._pending) < (self.capacity if only_if_full else 1):
            return
        names = list(dict.fromkeys(name for _, scalars, _ in self._pending for name in scalars))
        missing = torch.full((), float("nan"), device=self._pending[0][1]["loss"].device)
        table = torch.stack(
            [torch.stack([scalars.get(name, missing).float() for name in names]) for _, scalars, _ in self._pending]
        )
        # fp16 loss scaling skips steps whose gradients overflow
        checked = ["loss"] if self._accelerator.mixed_precision == "fp16" else ["loss", "grad_norm"]
        for (step, _, indices), row in zip(self._pending, table.tolist(), strict=True):
            values = dict(zip(names, row, strict=True))
            if non_finite := [name for name in checked if not math.isfinite(values[name])]:
                quantity = "loss" if "loss" in non_finite else "gradient norm"
                name, examples = non_finite[0], torch.cat(indices).tolist()
                shown = ", ".join(str(index) for index in examples[:_MAX_SHOWN_INDICES])
                hidden = len(examples) - _MAX_SHOWN_INDICES
                checkpoints = list_checkpoints(self._output_dir)
                raise NonFiniteError(
                    f"The {quantity} of step {step} is {values[name]}.",
                    location=f"step {step}, process {self._accelerator.process_index}, examples {shown}"
                    + (f" and {hidden} more" if hidden > 0 else ""),
                    hint="check these examples; if they are valid, restart with a lower --learning_rate, longer "
                    "--warmup_steps, or another --dtype."
                    + (f" The last checkpoint is {checkpoints[-1]}." if checkpoints else ""),
                )
        table = self._accelerator.reduce(table, reduction="mean")
        for values in table.tolist():
            self._settled.append({name: value for name, value in zip(names, values) if not math.isnan(value)})
        self._pending.clear()

    def flush(self) -> dict[str, float]:
        """Read pending scalars, return the mean of each scalar over the steps (the sum for "tokens"), and clear.

        A metric is the ratio of the summed numerators and denominators; it is omitted if the denominators are 0.
        """
        self.settle()
        summary = {}
        for name in dict.fromkeys(name for row in self._settled for name in row):
            values = [row[name] for row in self._settled if math.isfinite(row.get(name, math.nan))]
            summary[name] = math.fsum(values) / (1 if name == "tokens" else max(len(values), 1))
        self._settled.clear()
        for name in [name.removesuffix(_NUMERATOR) for name in summary if name.endswith(_NUMERATOR)]:
            numerator, denominator = summary.pop(name + _NUMERATOR), summary.pop(name + _DENOMINATOR)
            if denominator:
                summary[name] = numerator / denominator
        return summary

    def state_dict(self) -> list[dict[str, Any]]:
        """The settled values; call `settle` first."""
        return self._settled

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore settled values."""
        self._settled = list(state)


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

    A terminal shows a progress bar with the remaining time, the loss and non-padding tokens per second, updated every
    second; otherwise it prints them as a line after the first step, at growing intervals and for each record. All
    records are written to `training_log.jsonl` and to the trackers.

    Args:
        start_step: Completed steps; later records of an earlier run are removed.
        title: Model and batch size, for the first line.

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
        if self._is_main:  # after a crash the log may be ahead of the checkpoint
            write_text_file(self._file, "".join(json.dumps(record) + "\n" for record in self.curve))
        steps = f"steps {start_step + 1:,} to {total_steps:,}"
        if start_step >= total_steps:
            steps = f"ends at step {start_step:,}"
        print_status(f"training {title}: {steps}, on {describe_device(accelerator)}", self._is_main)
        self._start_step, self._total_steps = start_step, total_steps
        # `disable=None` shows no bar if stderr is not a terminal
        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", disable=None if self._is_main else True, smoothing=0.05
        )
        self._bar.set_postfix_str("first step")  # which may take long: workers start, kernels are compiled
        self._timer = ReportTimer(0.0, *(LINE_INTERVALS if self._bar.disable else (1.0,)))
        self._reported_tokens = self._reported_seconds = 0.0

    def advance(self) -> bool:
        """Count a step; returns whether `show` is due."""
        self._bar.update()
        return self._is_main and self._timer.is_due()

    def show(self, step: int, loss: float, tokens: float, seconds: float, **fields: float) -> None:
        """Show the loss and the speed since the last call; `tokens` and `seconds` are of all steps since the start."""
        rate = (tokens - self._reported_tokens) / max(seconds - self._reported_seconds, 1e-9)
        self._reported_tokens, self._reported_seconds = tokens, seconds
        self._timer.restart()
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {loss:.4g}, {format_number(rate)} tokens/s")
        elif self._is_main:
            remaining = (self._total_steps - step) * seconds / max(step - self._start_step, 1)
            entries = [f"step {step:,} of {self._total_steps:,}", f"loss {loss:.4g}"]
            entries += [f"{name} {value:.3g}" for name, value in fields.items()]
            print_status(
                "  ".join([*entries, f"{format_number(rate)} tokens/s", f"{tqdm.format_interval(remaining)} left"])
            )

    def record(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step; metrics of an evaluation are shown, losses are shown by `show`."""
        record = {"step": step, **values}
        self.curve.append(record)
        if not self._is_main:
            return
        with wrap_write_errors(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if "loss" not in values:
            entries = [f"{name} {value:.4g}" for name, value in values.items()]
            if len(entries) > _MAX_SHOWN_METRICS:
                entries = [*entries[:_MAX_SHOWN_METRICS], "..."]
            print_status("  ".join([f"step {step:,}", *entries]))
        self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class Stopwatch:
    """`seconds` of training, without evaluation and saving, up to the last pause."""

    def __init__(self) -> None:
        self._start: float | None = None
        self.seconds = 0.0

    @property
    def elapsed(self) -> float:
        """The seconds up to now."""
        return self.seconds + (0.0 if self._start is None else time.perf_counter() - self._start)

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
    """Plot the losses of a training log, and the frequency baselines of held-out losses as horizontal lines, into a PNG
    file; returns False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)")
    names = dict.fromkeys(name for record in curve for name in record if name == "loss" or name.endswith("_loss"))
    # a training loss and its held-out loss have one color
    terms = dict.fromkeys(name.removeprefix("eval_") for name in names)
    colors = {term: f"C{number}" for number, term in enumerate(terms)}
    for name in names:
        points = [(record["step"], record[name]) for record in curve if name in record]
        style: dict[str, Any] = {"marker": "o", "linestyle": "--"} if name.startswith("eval_") else {}
        axes.plot(*zip(*points, strict=True), label=name, color=colors[name.removeprefix("eval_")], **style)
    for term in [term for term in colors if term in baselines]:
        axes.axhline(baselines[term], label=f"{term}, by frequency", color=colors[term], linestyle=":")
    if names:
        figure.legend(loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True
