"""The learning-rate range test: a peak learning rate from a short run with increasing rates."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType
from scipy.ndimage import gaussian_filter1d

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors, write_text_file
from hf_ctxmodels.training.optimizers import unwrap_optimizer
from hf_ctxmodels.training.random_state import random_state, set_random_state
from hf_ctxmodels.training.training_step import Batch, TrainingStep, next_batches

RANGE_TEST_FILE = "lr_range_test.csv"
LOWEST_RATE, HIGHEST_RATE, MAX_STEPS = 1e-6, 10.0, 100
_DIVERGENCE = 4.0  # multiple of the lowest loss at which the test stops, as in fastai's `lr_find`
_MOMENTUM = 0.8  # of the running mean of the loss, which is compared with `_DIVERGENCE`
_SIGMA = 3.0  # steps; standard deviation of the Gaussian that smooths the curve


@dataclass(frozen=True)
class RangeTest:
    """The curve of a range test.

    Attributes:
        rates: (steps,) learning rates, increasing.
        losses: (steps,) training loss of the step with each rate, before its update.
    """

    rates: np.ndarray
    losses: np.ndarray

    @property
    def smoothed(self) -> np.ndarray:
        """(steps,) losses without the noise of single batches."""
        return gaussian_filter1d(self.losses, _SIGMA, mode="nearest")

    @property
    def suggestion(self) -> float:
        """The rate at which the smoothed loss falls fastest, clipped to between 1/10 and 1/2 of the rate with the
        lowest loss, because longer training at that rate diverges; raises CtxError if the loss does not fall.

        `docs/how-to/pretrain.md` has a comparison with a tenth.
        """
        if not len(self.losses):
            raise CtxError(
                "The loss of the first step is not finite.", location="--learning_rate auto", hint="check the data."
            )
        losses = self.smoothed
        if not losses.min() < losses[0]:
            raise CtxError(
                f"The loss falls at none of the {len(losses)} learning rates from {self.rates[0]:.1g} to "
                f"{self.rates[-1]:.1g}.",
                location="--learning_rate auto",
                hint="check the data, or pass a number.",
            )
        lowest = self.rates[int(losses.argmin())]
        steepest = self.rates[int(np.gradient(losses)[: int(losses.argmin()) + 1].argmin())]
        return float(f"{np.clip(steepest, lowest / 10, lowest / 2):.2g}")

    def save(self, output_dir: str | Path) -> None:
        """Write the curve as CSV and, if matplotlib is installed, as PNG."""
        file = Path(output_dir) / RANGE_TEST_FILE
        rows = zip(self.rates.tolist(), self.losses.tolist(), self.smoothed.tolist(), strict=True)
        lines = ["learning_rate,loss,smoothed_loss", *(",".join(f"{value:.6g}" for value in row) for row in rows)]
        write_text_file(file, "\n".join(lines) + "\n")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="training loss", xscale="log")
        axes.plot(self.rates, self.losses, alpha=0.3, label="steps")
        axes.plot(self.rates, self.smoothed, color="C0", label="smoothed")
        axes.axvline(self.suggestion, color="C1", linestyle=":", label=f"suggestion: {self.suggestion:g}")
        axes.set_ylim(top=2 * self.losses[0] - self.losses.min())
        axes.legend()
        axes.grid(alpha=0.3)
        with wrap_write_errors(file):
            figure.savefig(file.with_suffix(".png"), dpi=120)


def learning_rate_range_test(
    training_step: TrainingStep,
    batches: Iterator[Batch],
    micro_batches: int = 1,
    before_step: Callable[[], object] = lambda: None,
) -> RangeTest:
    """Train with exponentially increasing learning rates until the loss diverges (Smith 2017, arXiv 1506.01186, section
    3.3), then restore the weights, the optimizer and the random generators of this process exactly.

    A collective call; all processes measure the mean of their losses.

    Args:
        training_step: The step of the run, with a separate state carrier, since recurrent states are not restored. The
            rates of the optimizer's parameter groups are factors of the learning rate.
        batches: Endless micro-batches.
        micro_batches: Micro-batches per step.
        before_step: Called before each step.

    Raises:
        CtxError: DeepSpeed holds the optimizer, so that it cannot be restored.
    """
    accelerator, optimizer = training_step.accelerator, unwrap_optimizer(training_step.optimizer)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise CtxError(
            "The range test does not support DeepSpeed.", location="--learning_rate auto", hint="pass a number."
        )
    rates, losses, running, lowest = np.geomspace(LOWEST_RATE, HIGHEST_RATE, MAX_STEPS), [], 0.0, math.inf
    with _restored(training_step):
        training_step.model.train()
        factors = [group["lr"] for group in optimizer.param_groups]
        bar = progress_bar(rates, "learning-rate range test", unit="steps", enabled=accelerator.is_main_process)
        for number, rate in enumerate(bar, 1):
            before_step()
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = rate * factor
            scalars, _ = training_step(next_batches(batches, micro_batches))
            loss = accelerator.reduce(scalars["loss"].float(), reduction="mean").item()
            running = _MOMENTUM * running + (1 - _MOMENTUM) * loss
            unbiased = running / (1 - _MOMENTUM**number)
            lowest = min(lowest, unbiased)
            if not math.isfinite(loss) or unbiased > _DIVERGENCE * lowest:
                break
            losses.append(loss)
    return RangeTest(rates[: len(losses)], np.array(losses))


@contextmanager
def _restored(training_step: TrainingStep) -> Iterator[None]:
    """A context after which the model, the optimizer and the random generators are as before."""
    model, optimizer = training_step.model, unwrap_optimizer(training_step.optimizer)
    scaler = training_step.accelerator.scaler
    tensors = [*model.parameters(), *model.buffers()]
    saved_tensors = [tensor.detach().clone() for tensor in tensors]
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    scaler_state = scaler.state_dict() if scaler is not None else {}
    was_training, generators = model.training, random_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, saved in zip(tensors, saved_tensors, strict=True):
                tensor.copy_(saved)
        optimizer.load_state_dict(optimizer_state)
        if scaler is not None:
            scaler.load_state_dict(scaler_state)
        model.train(was_training)
        set_random_state(generators)
