"""Optimizer steps: forward and backward over micro-batches, clipping, update."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.batches import INDEX_KEY, Batch, count_items
from hf_ctxmodels.training.optim.averaging import scaled_learning_rate
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier


def loss_targets(model: nn.Module) -> tuple[str, ...]:
    """Names of the targets of a model's loss; raises CtxError if the model has no `loss_targets`."""
    targets = getattr(model, "loss_targets", None)
    if targets is None:
        raise CtxError(
            f"{type(model).__name__} has no `loss_targets`, so its loss cannot be normalised over an optimizer step.",
            hint="train a head of this package, or use transformers.Trainer for other models.",
        )
    return targets


def component_losses(output: ModelOutput) -> dict[str, torch.Tensor]:
    """The loss terms for the log: output fields named `..._loss`."""
    return {name: value for name, value in output.items() if name.endswith("_loss") and value is not None}


def metric_counts(output: ModelOutput) -> dict[str, torch.Tensor]:
    """Metrics for the log: a head's output field `metrics`, name -> (numerator, denominator).

    Both are sums over the batch, and so may be summed over batches: accuracy is (right predictions, targets), precision
    (true positives, predicted positives), F1 (2 x true positives, predicted positives + positives).
    """
    return dict(output.get("metrics") or {})


class Stepper:
    """Makes optimizer steps with the gradient of one big batch.

    The head divides each term's sum over targets by the number of targets in the whole step, over all micro-batches and
    processes, so the gradient is exact for any distribution of targets. Processes average their gradients, so each
    divides by count / processes.

    A head that `supports_inplace_optimizer` is given the learning rate (and AdaGrad's sums of squares) and updates its
    weights in its forward pass, on a single process.

    Args:
        carried: The model's states after the previous step.
        lr_reference_targets: Number of targets at which a step has the unscaled learning rate; 0 for no scaling.
        before_update: Changes the gradients of the whole step, given what they are scaled by, and gives terms for the
            log; see `finetuning.method.FinetuningCallback`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        max_grad_norm: float,
        carried: RecurrentStateCarrier,
        lr_reference_targets: float = 0.0,
        before_update: Callable[[float], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm or float("inf")
        self._carried = carried
        self._reference_targets = lr_reference_targets
        self._before_update = before_update
        bare = accelerator.unwrap_model(model)
        self._targets = loss_targets(bare)
        self._in_place = hasattr(bare, "supports_inplace_optimizer") and bare.supports_inplace_optimizer(
            optimizer.optimizer
        )
        if self._in_place and accelerator.num_processes > 1:
            name = type(optimizer.optimizer).__name__
            raise CtxError(
                f"{name} updates {type(bare).__name__} in place, which needs a single process.",
                location=f"--optimizer {name.lower()} on {accelerator.num_processes} processes",
                hint="start one process, which uses all threads, or use another --optimizer.",
            )

    def step(self, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Train on the micro-batches of one step.

        Returns:
            0-dimensional tensors "loss", component losses, that of the batches' task, "grad_norm" (before clipping) and
            "tokens" (of all processes), to be averaged over processes, and (2,) tensors of `metric_counts`; and the
            example indices of every micro-batch.
        """
        indices = [batch.pop(INDEX_KEY) for batch in batches]
        counts = self._accelerator.reduce(count_items(batches, self._targets), reduction="sum")
        processes = self._accelerator.num_processes
        # a step without targets has loss 0, not 0/0
        divisors = {name: counts[i].clamp(min=1) / processes for i, name in enumerate(self._targets)}
        scalars: dict[str, torch.Tensor] = {}
        for number, (batch, rows) in enumerate(zip(batches, indices, strict=True)):
            last = number == len(batches) - 1
            self._accelerator.sync_gradients = last  # DeepSpeed's engine reads it
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                more = self._carried.inputs(number, rows) | self._rate()
                output = self._model(**batch, **more, num_items_in_batch=divisors)
                if not self._in_place:
                    self._accelerator.backward(output.loss)
            self._carried.take(number, rows, output)
            terms = {"loss": output.loss, **component_losses(output), **metric_counts(output)}
            if isinstance(batch.get("task"), str):  # of `CtxMultiTaskModel`: all batches of a step have the same
                terms[f"{batch['task']}_loss"] = output.loss
            for name, value in terms.items():
                scalars[name] = scalars[name] + value.detach() if name in scalars else value.detach()
        scalars |= self._penalties(scalars)
        scalars["grad_norm"] = self._clip()
        scalars["tokens"] = counts[-1]
        share = counts[0] / self._reference_targets if self._reference_targets else 1.0
        with scaled_learning_rate(self._optimizer, share):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return scalars, indices

    @property
    def learning_rate(self) -> float:
        """Of the first group of parameters, now."""
        return self._optimizer.param_groups[0]["lr"]

    def _penalties(self, scalars: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The terms that ways to fine-tune add to the step as a whole, and the loss with them."""
        if self._before_update is None:
            return {}
        scaler = self._accelerator.scaler
        terms = self._before_update(1.0 if scaler is None else scaler.get_scale())
        added = [value for name, value in terms.items() if name.endswith("_loss")]
        return {**terms, "loss": scalars["loss"] + sum(added)} if added else terms

    def _rate(self) -> dict[str, Any]:
        """The learning rate, for a head with in-place updates."""
        if not self._in_place:
            return {}
        rate: dict[str, Any] = {"learning_rate": self._optimizer.param_groups[0]["lr"]}
        if isinstance(self._optimizer.optimizer, torch.optim.Adagrad):
            state = self._optimizer.optimizer.state
            rate["squares"] = {name: state[each]["sum"] for name, each in self._model.named_parameters()}
        return rate

    def _clip(self) -> torch.Tensor:
        sparse = [each.grad for each in self._model.parameters() if each.grad is not None and each.grad.is_sparse]
        if sparse:
            return self._clip_sparse()
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm.detach()

    def _clip_sparse(self) -> torch.Tensor:
        """Clipping as in torch, which does not support sparse gradients."""
        gradients = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                gradients.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(values) for values in gradients]))
        if math.isfinite(self._max_grad_norm):
            share = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1)
            for values in gradients:
                values.mul_(share)
        return norm
