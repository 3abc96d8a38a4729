"""One optimizer step: forward and backward over its micro-batches, clipping, update."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.training.batches import INDEX_KEY, Batch, count_items
from hf_ctxmodels.training.carry import CarriedState


def loss_targets(model: nn.Module) -> tuple[str, ...]:
    """Names of the batch entries that the model's loss counts.

    Raises:
        CtxError: the model does not say (it is not one of this package's heads).
    """
    targets = getattr(model, "loss_targets", None)
    if targets is None:
        raise CtxError(
            f"{type(model).__name__} has no `loss_targets`, so its loss cannot be normalised over an optimizer step.",
            mend="train a head of this package, or use transformers.Trainer for other models.",
        )
    return targets


def component_losses(output: ModelOutput) -> dict[str, torch.Tensor]:
    """The terms of a loss of several terms, for the log: output fields named `..._loss`."""
    return {name: value for name, value in output.items() if name.endswith("_loss") and value is not None}


def metric_counts(output: ModelOutput) -> dict[str, torch.Tensor]:
    """What a head counts for the log: its output field `metrics`, name -> (numerator, denominator) over this batch.

    Both are sums over the batch, so a metric over many batches is the sum of the first by the sum of the second:
    accuracy is (right guesses, targets), precision (true positives, guessed positives), F1 (2 x true positives,
    guessed positives + positives).
    """
    return dict(output.get("metrics") or {})


class Stepper:
    """Makes optimizer steps whose gradient is that of one big batch.

    The head divides each term's sum over targets by the number of targets in the whole step, over all micro-batches and
    processes, so the gradient is exact for any distribution of targets. Processes average their gradients, hence the
    factor: each divides by count / processes.

    Args:
        carried: what the model remembers of the step before.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        max_grad_norm: float,
        carried: CarriedState,
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm or float("inf")
        self._carried = carried
        self._targets = loss_targets(accelerator.unwrap_model(model))

    def step(self, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Train on the micro-batches of one step.

        Returns:
            0-dimensional tensors "loss", component losses, "grad_norm" (before clipping) and "tokens" (all processes),
            of which the mean over processes is the step's value, and (2,) tensors of `metric_counts`; and the example
            indices of every micro-batch.
        """
        indices = [batch.pop(INDEX_KEY) for batch in batches]
        counts = self._accelerator.reduce(count_items(batches, self._targets), reduction="sum")
        processes = self._accelerator.num_processes
        # A step without any target has loss 0, not 0/0.
        divisors = {name: counts[i].clamp(min=1) / processes for i, name in enumerate(self._targets)}
        scalars: dict[str, torch.Tensor] = {}
        for number, (batch, rows) in enumerate(zip(batches, indices, strict=True)):
            last = number == len(batches) - 1
            self._accelerator.sync_gradients = last  # DeepSpeed's engine reads it
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                output = self._model(**batch, **self._carried.inputs(number, rows), num_items_in_batch=divisors)
                self._accelerator.backward(output.loss)
            self._carried.take(number, rows, output)
            terms = {"loss": output.loss, **component_losses(output), **metric_counts(output)}
            for name, value in terms.items():
                scalars[name] = scalars[name] + value.detach() if name in scalars else value.detach()
        scalars["grad_norm"] = self._clip()
        scalars["tokens"] = counts[-1]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return scalars, indices

    def _clip(self) -> torch.Tensor:
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm.detach()
