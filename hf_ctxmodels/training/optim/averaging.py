"""Averaged SGD (Polyak & Juditsky 1992): the mean of the weights of many steps instead of the last ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.arguments import LoopArguments

NEVER = 1e15  # a step that no run reaches
FROM_THE_START = -1


class Averaging:
    """The averages that `torch.optim.ASGD` makes, and when they begin.

    With `nt-asgd` that is when the held-out loss is worse than the best one of those more than `average_after`
    evaluations ago (Merity et al. 2017, algorithm 1); with `asgd`, the first step. Evaluations and the final model have
    the averages, checkpoints both. For any other optimizer nothing happens.

    Args:
        optimizer: not wrapped.
        arguments: the loop's.
        evaluates: whether there is anything held out.

    Raises:
        CtxError: nt-asgd, and nothing is held out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: LoopArguments, evaluates: bool) -> None:
        self._optimizer, self._interval = optimizer, arguments.average_after
        self._averages = isinstance(optimizer, torch.optim.ASGD)
        self._waits = arguments.optimizer == "nt-asgd"
        self._losses: list[float] = []
        if self._waits and not evaluates:
            raise CtxError(
                "nt-asgd begins to average when the held-out loss falls no more, and nothing is held out.",
                location="--optimizer nt-asgd",
                hint="hold something out (--validation_fraction), or use --optimizer asgd.",
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the weights are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Begin to average, if an evaluation after `step` steps says so."""
        if not self._waits or "eval_loss" not in metrics:
            return
        loss, before = metrics["eval_loss"], self._losses[: -self._interval]
        if before and loss > min(before):
            self._waits = False
            self._set(step - 1)  # torch counts so that the next step is the first of the mean then
        self._losses.append(loss)

    def settle(self) -> None:
        """Leave the averages in the model."""
        self._swap()

    def state_dict(self) -> dict[str, Any]:
        """As JSON: the losses, and since when there are averages."""
        return {"losses": self._losses, "begun": self._optimizer.param_groups[0].get("t0", NEVER)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._losses = list(state["losses"])
        self._waits = self._waits and state["begun"] == NEVER
        if self._averages:
            self._set(state["begun"])

    def _set(self, step: float) -> None:
        for group in self._optimizer.param_groups:
            group["t0"] = step

    @torch.no_grad()
    def _swap(self) -> None:
        if not self._averages:
            return
        for parameter, state in self._optimizer.state.items():
            weights = parameter.clone()
            parameter.copy_(state["ax"])
            state["ax"].copy_(weights)


@contextmanager
def scaled_rate(optimizer: Any, factor: torch.Tensor | float) -> Iterator[None]:
    """Within, learning rates are `factor` times what they were. ASGD's is that of this step, not of the one before.

    Args:
        optimizer: wrapped by Accelerate or not.
        factor: 1 for no change.
    """
    bare = getattr(optimizer, "optimizer", optimizer)
    averages = isinstance(bare, torch.optim.ASGD)
    if not averages and isinstance(factor, float) and factor == 1:
        yield
        return
    rates = [group["lr"] for group in bare.param_groups]
    for group, rate in zip(bare.param_groups, rates, strict=True):
        group["lr"] = rate * float(factor)
        for parameter in group["params"] if averages else ():
            if bare.state.get(parameter):
                bare.state[parameter]["eta"].fill_(group["lr"])
    try:
        yield
    finally:
        for group, rate in zip(bare.param_groups, rates, strict=True):
            group["lr"] = rate
