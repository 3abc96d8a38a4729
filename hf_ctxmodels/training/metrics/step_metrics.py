"""Scalars of each step (loss, gradient norm, tokens), read from the device in groups."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from hf_ctxmodels.core.errors import CtxError

_MAX_SHOWN_INDICES = 64
_NUMERATOR, _DENOMINATOR = "|numerator", "|denominator"


class NonFiniteError(CtxError):
    """The loss or the gradient norm became infinite or NaN."""


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raise NonFiniteError if a weight is NaN or infinite, which may happen with finite gradients."""
    parameters = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        finite = torch.stack([parameter.isfinite().all() for parameter in parameters.values()]).tolist()
    if not all(finite):
        non_finite = [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]
        raise NonFiniteError(
            f"{len(non_finite)} weights are not finite after step {step}, the first is {non_finite[0]}; the last good "
            "checkpoint is kept.",
            location=f"step {step}",
            hint="restart with a lower --learning_rate or longer --warmup_steps.",
        )


class StepMetrics:
    """Scalars of the steps since the last log record.

    Reading a scalar synchronises with the device, so scalars are collected as tensors (`add`) and read together
    (`settle`) at logging and saving, and at least every `capacity` steps. Settled values are means over processes.
    """

    capacity = 64

    def __init__(self, accelerator: Accelerator, output_dir: str) -> None:
        self._accelerator = accelerator
        self._output_dir = output_dir
        self._pending: list[tuple[int, dict[str, torch.Tensor], list[torch.Tensor]]] = []
        self._settled: list[dict[str, float]] = []

    def add(self, step: int, scalars: dict[str, torch.Tensor], example_indices: list[torch.Tensor]) -> None:
        """Add the scalars of a step and the indices of its examples.

        Args:
            step: Number of the step.
            scalars: 0-dimensional tensors, or (2,) numerator and denominator of a metric. Names may differ between
                steps, but not between processes.
            example_indices: Indices of the examples in each micro-batch.
        """
        flat: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            flat |= {name: value} if value.ndim == 0 else {name + _NUMERATOR: value[0], name + _DENOMINATOR: value[1]}
        self._pending.append((step, flat, example_indices))

    @property
    def full(self) -> bool:
        """Whether the values must be read (`settle`)."""
        return len(self._pending) >= self.capacity

    @property
    def tokens(self) -> float:
        """Tokens of the settled steps."""
        return math.fsum(row["tokens"] for row in self._settled)

    def settle(self) -> None:
        """Read the collected scalars from the device.

        Raises:
            NonFiniteError: The loss of a step, or its gradient norm without fp16, is not finite.
        """
        if not self._pending:
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
            for name in checked:
                if not math.isfinite(values[name]):
                    raise self._non_finite(step, name, values[name], indices)
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

    def _non_finite(self, step: int, name: str, value: float, indices: list[torch.Tensor]) -> NonFiniteError:
        example_indices = torch.cat(indices).tolist()
        shown = ", ".join(str(index) for index in example_indices[:_MAX_SHOWN_INDICES])
        hidden = len(example_indices) - _MAX_SHOWN_INDICES
        more = f" and {hidden} more" if hidden > 0 else ""
        quantity = "loss" if name == "loss" else "gradient norm"
        return NonFiniteError(
            f"The {quantity} of step {step} is {value}; training stopped, and the last good checkpoint is kept.",
            location=f"step {step}, process {self._accelerator.process_index}, examples {shown}{more}",
            hint="check these examples; if they are valid, restart with a lower --learning_rate, longer "
            f"--warmup_steps, or --mixed_precision bf16 or no. Earlier checkpoints are in {self._output_dir}.",
        )
