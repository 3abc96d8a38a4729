"""Averaged SGD (Polyak & Juditsky 1992): the mean of the weights over many steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.arguments import LoopArguments, NTASGDOptions

NEVER = 1e15  # a step that no run reaches
FROM_THE_START = -1


class Averaging:
    """The averaged weights of `torch.optim.ASGD`; without effect for other optimizers.

    `asgd` averages from the first step. `nt-asgd` starts when the validation loss is above the lowest loss of more than
    `patience` evaluations ago (Merity et al. 2017, algorithm 1). Evaluations and the final model use the averages;
    checkpoints contain both.

    Args:
        optimizer: The optimizer, not wrapped.
        arguments: The arguments of the loop.
        has_evaluation: Whether there is validation data.

    Raises:
        CtxError: nt-asgd without validation data.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: LoopArguments, has_evaluation: bool) -> None:
        options = arguments.optimizer
        self._optimizer = optimizer
        self._interval = options.patience if isinstance(options, NTASGDOptions) else 0
        self._is_asgd = isinstance(optimizer, torch.optim.ASGD)
        self._is_waiting = isinstance(options, NTASGDOptions)
        self._losses: list[float] = []
        if self._is_waiting and not has_evaluation:
            raise CtxError(
                "nt-asgd depends on the validation loss, but there is no validation data.",
                location="--optimizer nt-asgd",
                hint="hold out data (--validation_fraction), or use --optimizer asgd.",
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Start averaging if the evaluation after `step` steps meets the criterion."""
        if not self._is_waiting or "eval_loss" not in metrics:
            return
        loss, earlier_losses = metrics["eval_loss"], self._losses[: -self._interval]
        if earlier_losses and loss > min(earlier_losses):
            self._is_waiting = False
            self._set_start(step - 1)  # in torch's count, the next step is then the first one averaged
        self._losses.append(loss)

    def settle(self) -> None:
        """Set the model's weights to the averages."""
        self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The validation losses and the first averaged step, as JSON values."""
        return {"losses": self._losses, "begun": self._optimizer.param_groups[0].get("t0", NEVER)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._losses = list(state["losses"])
        self._is_waiting = self._is_waiting and state["begun"] == NEVER
        if self._is_asgd:
            self._set_start(state["begun"])

    def _set_start(self, step: float) -> None:
        for group in self._optimizer.param_groups:
            group["t0"] = step

    @torch.no_grad()
    def _swap(self) -> None:
        if not self._is_asgd:
            return
        for parameter, state in self._optimizer.state.items():
            weights = parameter.clone()
            parameter.copy_(state["ax"])
            state["ax"].copy_(weights)


@contextmanager
def scaled_learning_rate(optimizer: Any, factor: torch.Tensor | float) -> Iterator[None]:
    """A context in which learning rates are multiplied by `factor`, also in ASGD's state, which has a copy of the rate
    of the previous step.

    Args:
        optimizer: The optimizer, possibly wrapped by Accelerate.
        factor: 1 for no change.
    """
    unwrapped = getattr(optimizer, "optimizer", optimizer)
    is_asgd = isinstance(unwrapped, torch.optim.ASGD)
    if not is_asgd and isinstance(factor, float) and factor == 1:
        yield
        return
    rates = [group["lr"] for group in unwrapped.param_groups]
    for group, rate in zip(unwrapped.param_groups, rates, strict=True):
        group["lr"] = rate * float(factor)
        for parameter in group["params"] if is_asgd else ():
            if unwrapped.state.get(parameter):
                unwrapped.state[parameter]["eta"].fill_(group["lr"])
    try:
        yield
    finally:
        for group, rate in zip(unwrapped.param_groups, rates, strict=True):
            group["lr"] = rate
