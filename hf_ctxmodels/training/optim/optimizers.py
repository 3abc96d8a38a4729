"""Optimizers and learning-rate schedules."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Adafactor, get_scheduler

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.arguments import (
    AdafactorOptions,
    AdaGradOptions,
    AdamWOptions,
    ASGDOptions,
    ConstantOptions,
    CosineOptions,
    InverseSquareRootOptions,
    LambOptions,
    LinearOptions,
    LoopArguments,
    NTASGDOptions,
    SGDOptions,
    SlantedTriangularOptions,
)
from hf_ctxmodels.training.optim.averaging import FROM_THE_START, NEVER
from hf_ctxmodels.training.optim.layer_groups import group_rates, has_heads, layer_groups, require_layers
from hf_ctxmodels.training.optim.scaled_adamw import ScaledAdamW


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: with weight decay, and without it parameters of fewer than two dimensions,
    which are biases and normalisation weights (BERT, appendix A.2)."""
    return _by_decay([parameter for parameter in model.parameters() if parameter.requires_grad], weight_decay)


def discriminative_groups(
    model: Any, weight_decay: float, learning_rate: float, decay: float, head_rate: float | None = None
) -> list[dict]:
    """`parameter_groups` for each group of layers: the heads have `learning_rate`, and each lower group the rate of the
    group above divided by `decay` (Howard & Ruder 2018, section 3.2).

    With `head_rate` the heads have this rate, and `learning_rate` is the rate of the last layer (Lample & Conneau 2019,
    the released code: separate optimizers for encoder and projection).

    Raises:
        CtxError: `head_rate` is given for a model without heads, or the model's stack of layers is unknown.
    """
    if decay != 1:
        require_layers(model)
    groups = layer_groups(model)
    rates = group_rates(groups, learning_rate, decay)
    if head_rate is not None:
        if not has_heads(model):
            raise CtxError(
                f"{type(model).__name__} has no head for --head_learning_rate.",
                location="--head_learning_rate",
                hint="remove it, or train a model with a head.",
            )
        rates = [*group_rates(groups[:-1], learning_rate, decay), head_rate]
    return [
        {**group, "lr": rate}
        for parameters, rate in zip(reversed(groups), reversed(rates))
        for group in _by_decay(parameters, weight_decay)
    ]


def _by_decay(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    not_decayed = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, arguments: LoopArguments) -> torch.optim.Optimizer:
    """The optimizer of the loop's arguments, over `parameter_groups` or `discriminative_groups`.

    For Trainer: `Trainer(..., optimizers=(make_optimizer(model, arguments), None))`.

    Raises:
        CtxError: The optimizer's package is not installed, or as `discriminative_groups`.
    """
    options, rate = arguments.optimizer, arguments.learning_rate
    if arguments.layerwise_lr_decay == 1 and arguments.head_learning_rate is None:
        groups = parameter_groups(model, options.weight_decay)
    else:
        groups = discriminative_groups(
            model, options.weight_decay, rate, arguments.layerwise_lr_decay, arguments.head_learning_rate
        )
    match options:
        case AdamWOptions() | LambOptions():
            settings: dict[str, Any] = {"lr": rate, "betas": (options.beta1, options.beta2), "eps": options.epsilon}
            if isinstance(options, LambOptions):
                return _lamb(groups, settings)
            if options.scale_by_size:
                return ScaledAdamW(groups, **settings)
            # Loshchilov & Hutter 2019; the fused form is one kernel for all parameters
            return torch.optim.AdamW(groups, fused=True, **settings)
        case AdafactorOptions():
            # Shazeer & Stern 2018 with the rate of the schedule; updates are clipped to a root mean square of 1
            return Adafactor(groups, lr=rate, scale_parameter=options.scale_by_size, relative_step=False)
        case ASGDOptions():
            start = NEVER if isinstance(options, NTASGDOptions) else FROM_THE_START
            return torch.optim.ASGD(groups, lr=rate, lambd=0.0, t0=start)
    _use_sparse_gradients(model, options)
    return (torch.optim.SGD if isinstance(options, SGDOptions) else torch.optim.Adagrad)(groups, lr=rate)


def _use_sparse_gradients(model: Any, options: SGDOptions | AdaGradOptions) -> None:
    """Switch a model to sparse gradients, if it supports them; raises CtxError if there is weight decay."""
    if not hasattr(model, "set_sparse_gradients"):
        return
    if options.weight_decay:
        raise CtxError(
            f"Weight decay does not support the sparse gradients of {type(model).__name__}.",
            location=f"--optimizer weight_decay={options.weight_decay:g}",
            hint="remove weight_decay.",
        )
    model.set_sparse_gradients(True)


def _lamb(groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    """LAMB (You et al. 2020, algorithm 2) as in ALBERT's released code: the norm of the update includes weight decay,
    moments have no bias correction, the trust ratio is the ratio of the norms, and biases and normalisation weights
    have a trust ratio of 1. The update does not depend on the step number, so restored moments make a resume exact."""
    try:
        from pytorch_optimizer import Lamb
    except ImportError as error:
        raise CtxError(
            "LAMB needs the package pytorch_optimizer.",
            location="--optimizer lamb",
            hint="pip install 'hf_ctxmodels[lamb]', or use --optimizer adamw.",
        ) from error
    for group in groups:
        group["adam"] = group["params"][0].ndim < 2  # a trust ratio of 1
    optimizer = Lamb(groups, weight_decouple=False, adam_debias=True, **options)
    optimizer.clamp = math.inf  # the package limits the norm of weights to 10; large embeddings exceed it
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, arguments: LoopArguments, total_steps: int) -> LRScheduler:
    """The learning-rate schedule: linear warm-up, then linear or cosine decay until `total_steps` or a constant rate;
    slanted triangular; or the inverse square root of the step."""
    warmup = arguments.warmup(total_steps)
    options = arguments.lr_scheduler
    if isinstance(options, InverseSquareRootOptions):
        # T5's pretraining schedule, without a linear warm-up
        return LambdaLR(optimizer, lambda step: math.sqrt(max(1, warmup) / max(1, step, warmup)))
    if isinstance(options, SlantedTriangularOptions):
        return LambdaLR(optimizer, lambda step: slanted_triangle(step, warmup, total_steps, options.ratio))
    steps = {"num_warmup_steps": warmup, "num_training_steps": total_steps}
    if isinstance(options, CosineOptions) and options.min_rate:
        lowest = {"min_lr_rate": options.min_rate}
        return get_scheduler("cosine_with_min_lr", optimizer, **steps, scheduler_specific_kwargs=lowest)
    names = {LinearOptions: "linear", CosineOptions: "cosine", ConstantOptions: "constant_with_warmup"}
    return get_scheduler(names[type(options)], optimizer, **steps)


def slanted_triangle(step: int, cut: int, total_steps: int, ratio: float = 32) -> float:
    """The slanted triangular learning rate of a step, relative to the peak (Howard & Ruder 2018, equation 3).

    Args:
        step: Completed steps.
        cut: Step of the peak; a tenth of all steps in the paper.
        total_steps: Steps of the run, T.
        ratio: Ratio of the peak to the lowest rate.
    """
    height = step / cut if step < cut else 1 - (step - cut) / max(1, total_steps - cut)
    return (1 + height * (ratio - 1)) / ratio
