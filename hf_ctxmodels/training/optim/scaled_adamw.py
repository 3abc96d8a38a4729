"""AdamW with Adafactor's scaling of the step by the size of the parameter."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_SCALE = 1e-3  # epsilon_2 of Shazeer & Stern 2018, so that a parameter that is zero moves


class ScaledAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose step for each parameter is multiplied by the parameter's root mean square
    (Shazeer & Stern 2018, section 8), at least `SMALLEST_SCALE`.

    T5's weights have very different sizes: query weights are small, because attention scores are not divided by the
    square root of the head dimension, and embeddings are large. With equal steps for all parameters plain AdamW
    diverges; with this scaling it is as good as Adafactor, which also scales (comparison in PiotrNawrot/nanoT5). Weight
    decay is not scaled.

    Args:
        params: Parameters or groups.
        lr: Learning rate, relative to a parameter's root mean square.
        betas: Decay of the two moments, which are bias-corrected.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; returns the loss of `closure`, if given, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        number = float(state["step"])
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**number)).sqrt_().add_(group["eps"])
        scale = parameter.norm().div(math.sqrt(parameter.numel())).clamp_(min=SMALLEST_SCALE)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(first / denominator * scale, alpha=group["lr"] / (1 - beta1**number))
