"""Optimizers, groups of parameters by depth, learning-rate schedules, and averaged weights."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Adafactor, PreTrainedModel, get_scheduler

from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.training.arguments import (
    AdafactorOptions,
    AdaGradOptions,
    AdamOptions,
    AdamWOptions,
    ASGDOptions,
    ConstantOptions,
    CosineOptions,
    InverseSquareRootOptions,
    LambOptions,
    LinearOptions,
    LoopArguments,
    MuonOptions,
    NTASGDOptions,
    SlantedTriangularOptions,
)
from hf_ctxmodels.training.defaults import with_default_rates

LAYERS = "layers"  # attribute of an encoder with its stack of layers
_STACKS = ("encoder", "decoder")  # submodules of an encoder-decoder with a stack each, in the order of application
LAYER = re.compile(rf"(?P<part>(?:(?:{'|'.join(_STACKS)})\.)?{LAYERS}\.(?P<number>\d+))\.")
"""Prefix of the names of a layer's parameters in the encoder."""

_EMBEDDINGS, _HEADS = -1.0, float("inf")  # depths of the modules below and above the layers
_SMALLEST_SCALE = 1e-3  # epsilon_2 of Shazeer & Stern 2018, so that a parameter that is zero moves
NEVER, _FROM_THE_START = 1e15, -1  # first steps that `torch.optim.ASGD` averages; no run reaches `NEVER`


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Non-empty groups of trainable parameters by depth: the embeddings, each layer from the lowest up, the heads.

    The layers of an encoder-decoder are the encoder's followed by the decoder's. Other modules of a stack belong to the
    embeddings if they precede its layers, else to the group above: the decoder's first layer, or the heads. Layers
    that share all parameters are one group.
    """
    groups = _parameters_by_depth(model)
    return [groups[depth] for depth in sorted(groups)]


def has_heads(model: PreTrainedModel) -> bool:
    """Whether the last of the `layer_groups` is the heads."""
    return _HEADS in _parameters_by_depth(model)


def require_layers(model: PreTrainedModel) -> None:
    """Raise CtxError if the encoder's stack of layers is unknown; word vectors need none."""
    base = model.base_model
    owners = [module for module in base.modules() if any(True for _ in module.parameters(recurse=False))]
    if not _stack_prefixes(base) and not all(isinstance(module, nn.Embedding) for module in owners):
        raise CtxError(
            f"{type(base).__name__} has no stack `{LAYERS}`, so the depths of its weights are unknown.",
            location="--layerwise_lr_decay or --freeze",
            hint="remove them, or use a family of this package.",
        )


def _stack_prefixes(base: nn.Module) -> list[str]:
    """Prefixes of the parameter names in the stacks of a base model, from the lowest stack up."""
    children = dict(base.named_children())
    if LAYERS in children:
        return [""]
    return [f"{name}." for name in _STACKS if name in children and LAYERS in dict(children[name].named_children())]


def _parameters_by_depth(model: PreTrainedModel) -> dict[float, list[nn.Parameter]]:
    base = model.base_model
    base_prefix = "" if base is model else f"{model.base_model_prefix}."
    stacks = _stack_prefixes(base)
    depths: dict[str, float] = {}  # prefix of parameter names -> depth; others belong to the embeddings
    number = 0
    for stack in stacks:
        module: Any = base.get_submodule(stack.rstrip("."))
        for index in range(len(module.layers)):
            depths[f"{stack}{LAYERS}.{index}."] = number + index
        number += len(module.layers)
        children = [child for child, _ in module.named_children()]
        for child in children[children.index(LAYERS) + 1 :]:
            depths[f"{stack}{child}."] = _HEADS if stack == stacks[-1] else number
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            depth = _HEADS
            if name.startswith(base_prefix):
                base_name = name.removeprefix(base_prefix)
                depth = next((depths[prefix] for prefix in depths if base_name.startswith(prefix)), _EMBEDDINGS)
            groups.setdefault(depth, []).append(parameter)
    return groups


def _groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay, and without it parameters of fewer than two dimensions,
    which are biases and normalization weights (BERT, appendix A.2)."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    not_decayed = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _discriminative_groups(
    model: Any, arguments: LoopArguments, rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """`_groups_by_decay` for each group of layers, the heads first: the heads have the learning rate, and each lower
    group the rate of the group above divided by `layerwise_lr_decay` (Howard & Ruder 2018, section 3.2).

    With `head_learning_rate` the heads have this rate, and the last layer the learning rate (Lample & Conneau 2019, the
    released code). Raises CtxError if the model has no heads for it, or its stack of layers is unknown.
    """
    if arguments.layerwise_lr_decay != 1:
        require_layers(model)
    rates = []
    if arguments.head_learning_rate is not None:
        if not has_heads(model):
            raise CtxError(
                f"{type(model).__name__} has no head for --head_learning_rate.",
                location="--head_learning_rate",
                hint="remove it, or train a model with a head.",
            )
        rates = [arguments.head_learning_rate]
    groups = layer_groups(model)[::-1]
    rates += [rate / arguments.layerwise_lr_decay**index for index in range(len(groups) - len(rates))]
    return [
        {**group, "lr": group_rate}
        for parameters, group_rate in zip(groups, rates, strict=True)
        for group in _groups_by_decay(parameters, weight_decay)
    ]


def make_optimizer(model: PreTrainedModel, arguments: LoopArguments) -> torch.optim.Optimizer:
    """The optimizer of the loop's arguments, also for `Trainer(..., optimizers=(make_optimizer(...), None))`; raises
    CtxError if its package is not installed, or the model does not support Muon, weight decay, a separate learning
    rate of the heads, or rates by layer."""
    arguments = with_default_rates(arguments, getattr(model, "config", None))
    options = arguments.optimizer
    assert options is not None
    assert arguments.learning_rate is not None
    rate = 1.0 if arguments.learning_rate == "auto" else arguments.learning_rate  # multiplied by the range test
    if arguments.layerwise_lr_decay == 1 and arguments.head_learning_rate is None:
        groups = _groups_by_decay(model.parameters(), options.weight_decay)
    else:
        groups = _discriminative_groups(model, arguments, rate, options.weight_decay)
    settings: dict[str, Any] = {"lr": rate}
    if isinstance(options, AdamOptions):
        settings |= {"betas": (options.beta1, options.beta2), "eps": options.epsilon}
    match options:
        case AdamWOptions(scale_by_size=True):
            return ScaledAdamW(groups, **settings)
        case AdamWOptions():
            # Loshchilov & Hutter 2019; the fused form is one kernel for all parameters
            return torch.optim.AdamW(groups, fused=True, **settings)
        case LambOptions():
            return _lamb(groups, settings)
        case MuonOptions():
            return MuonWithAdamW(_split_muon_groups(model, groups), momentum=options.momentum, **settings)
        case AdafactorOptions():
            # Shazeer & Stern 2018 with the rate of the schedule; updates are clipped to a root mean square of 1
            return Adafactor(groups, lr=rate, scale_parameter=options.scale_by_size, relative_step=False)
        case ASGDOptions():
            start = NEVER if isinstance(options, NTASGDOptions) else _FROM_THE_START
            return torch.optim.ASGD(groups, lr=rate, lambd=0.0, t0=start)
    set_sparse_gradients: Callable[[bool], None] | None = getattr(model, "set_sparse_gradients", None)
    if set_sparse_gradients is not None:
        if options.weight_decay:
            raise CtxError(
                f"Weight decay does not support the sparse gradients of {type(model).__name__}.",
                location=f"--optimizer weight_decay={options.weight_decay:g}",
                hint="remove weight_decay.",
            )
        set_sparse_gradients(True)
    if isinstance(options, AdaGradOptions):
        return torch.optim.Adagrad(groups, lr=rate, initial_accumulator_value=options.initial_accumulator)
    return torch.optim.SGD(groups, lr=rate)


def _lamb(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """LAMB (You et al. 2020, algorithm 2) as in ALBERT's released code: the norm of the update includes weight decay,
    moments have no bias correction, and biases and normalization weights have a trust ratio of 1. The update does not
    depend on the step number, so restored moments make a resume exact."""
    require_packages("pytorch_optimizer", extra="lamb", location="--optimizer lamb")
    from pytorch_optimizer import Lamb

    for group in groups:
        group["adam"] = group["params"][0].ndim < 2  # a trust ratio of 1
    optimizer = Lamb(groups, weight_decouple=False, adam_debias=True, **settings)
    optimizer.clamp = math.inf  # the package limits the norm of weights to 10; large embeddings exceed it
    return optimizer


def _split_muon_groups(model: PreTrainedModel, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of parameters, with the weights of the linear layers in the stack in separate groups with `use_muon`.

    Embeddings and heads are updated by AdamW, as in Jordan et al. 2024. Raises CtxError if the stack has no trainable
    linear layer.
    """
    depths = _parameters_by_depth(model)
    in_stack = {parameter for depth in depths.keys() - {_EMBEDDINGS, _HEADS} for parameter in depths[depth]}
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)} & in_stack
    if not linear:
        raise CtxError(
            f"Muon does not support {type(model).__name__}, whose layers have no trainable linear layers.",
            location="--optimizer muon",
            hint="use --optimizer adamw.",
        )
    split_groups = []
    for group in groups:
        for use_muon in (True, False):
            parameters = [parameter for parameter in group["params"] if (parameter in linear) == use_muon]
            if parameters:
                split_groups.append({**group, "params": parameters, "use_muon": use_muon})
    return split_groups


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss of the closure that an optimizer's `step` was given, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups with `use_muon`, which have matrices only, and AdamW for the other groups.

    Muon orthogonalizes the momentum of a matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon); a
    linear layer that projects to queries, keys and values is one matrix. Its updates are scaled to the root mean square
    of AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4), so that both have the same learning rate and weight
    decay. `betas` and `eps` are AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}  # by use_muon; each adds its options to its groups
        if groups := self._groups(use_muon=True):
            self._optimizers[True] = torch.optim.Muon(groups, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        if groups := self._groups(use_muon=False):
            self._optimizers[False] = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)

    def _groups(self, use_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"] == use_muon]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; returns the loss of `closure`, if given, which is called first."""
        loss = _evaluate(closure)
        for use_muon, optimizer in self._optimizers.items():
            # `load_state_dict` replaces both
            optimizer.state, optimizer.param_groups = self.state, self._groups(use_muon)
            optimizer.step()
        return loss


class ScaledAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose step for each parameter is multiplied by the parameter's root mean square
    (Shazeer & Stern 2018, section 8), at least 0.001.

    T5's weights have very different sizes, so plain AdamW diverges; with this scaling it is as good as Adafactor
    (comparison in PiotrNawrot/nanoT5). Weight decay is not scaled. The arguments are AdamW's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; returns the loss of `closure`, if given, which is called first."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            batches: dict[Any, list[Tensor]] = {}  # by step
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                key = float(state["step"]), parameter.dtype, parameter.device
                batches.setdefault(key, []).append(parameter)
            for (step, *_), parameters in batches.items():
                self._update(parameters, step, group)
        return loss

    def _update(self, parameters: list[Tensor], step: float, group: dict[str, Any]) -> None:
        """Update parameters, in a number of kernels that depends only on the number of their different shapes.

        torch has no kernel that scales each tensor of a list by a value on the device, so the denominators of all
        parameters of a shape are stacked.
        """
        beta1, beta2 = group["betas"]
        scales = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in torch._foreach_norm(parameters)]
        torch._foreach_div_(scales, [math.sqrt(parameter.numel()) for parameter in parameters])
        torch._foreach_clamp_min_(scales, _SMALLEST_SCALE)
        gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
        first, second = (
            [local_shard(self.state[parameter][name]) for parameter in parameters] for name in ("exp_avg", "exp_avg_sq")
        )
        parameters = [local_shard(parameter) for parameter in parameters]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        indices_by_shape: dict[torch.Size, list[int]] = {}
        for index, parameter in enumerate(parameters):
            indices_by_shape.setdefault(parameter.shape, []).append(index)
        for shape, indices in indices_by_shape.items():
            denominators = torch.stack([second[index] for index in indices])
            denominators.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            denominators.div_(torch.stack([scales[index] for index in indices]).view(-1, *[1] * len(shape)))
            torch._foreach_addcdiv_(
                [parameters[index] for index in indices],
                [first[index] for index in indices],
                denominators.unbind(),
                value=-group["lr"] / (1 - beta1**step),
            )


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_sharded_updates(options: Any, sharded_by: Literal["FSDP", "DeepSpeed"] = "FSDP") -> None:
    """Raise CtxError for an optimizer that cannot update sharded weights, which DeepSpeed also concatenates."""
    name = type(options).__name__.removesuffix("Options").lower()
    if isinstance(options, AdamWOptions) and options.scale_by_size:
        name += ":scale_by_size=true"
    is_unsupported = isinstance(options, AdafactorOptions | LambOptions | MuonOptions)
    if sharded_by == "DeepSpeed":
        is_unsupported |= isinstance(options, ASGDOptions) or name.endswith("scale_by_size=true")
    if is_unsupported:
        raise CtxError(
            f"{name} cannot update weights that are sharded by {sharded_by}.",
            location=f"--optimizer {name}",
            hint="use --optimizer adamw without scale_by_size, or data parallelism.",
        )


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
    """The slanted triangular learning rate after `step` steps, relative to the peak after `cut` steps (Howard & Ruder
    2018, equation 3); `ratio` is the ratio of the peak to the lowest rate."""
    height = step / cut if step < cut else 1 - (step - cut) / max(1, total_steps - cut)
    return (1 + height * (ratio - 1)) / ratio


class Averaging:
    """The averaged weights of `torch.optim.ASGD` (Polyak & Juditsky 1992).

    `asgd` averages from the first step. `nt-asgd` starts when the validation loss is above the lowest loss of more than
    `patience` evaluations ago (Merity et al. 2017, algorithm 1), and raises CtxError without validation data.
    Evaluations and the final model use the averages; checkpoints contain both.
    """

    def __init__(self, optimizer: torch.optim.ASGD, arguments: LoopArguments, has_evaluation: bool) -> None:
        self._optimizer = optimizer
        self._patience = arguments.optimizer.patience if isinstance(arguments.optimizer, NTASGDOptions) else None
        self._losses: list[float] = []
        if self._patience is not None and not has_evaluation:
            raise CtxError(
                "nt-asgd depends on the validation loss, but there is no validation data.",
                location="--optimizer nt-asgd",
                hint="hold out data (--validation_fraction), or use --optimizer asgd.",
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Start averaging if the evaluation after `step` steps meets the criterion."""
        if self._patience is None or self._start != NEVER or "eval_loss" not in metrics:
            return
        loss, earlier_losses = metrics["eval_loss"], self._losses[: -self._patience]
        if earlier_losses and loss > min(earlier_losses):
            self._start = step - 1  # in torch's count, the next step is then the first one averaged
        self._losses.append(loss)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the averages."""
        for parameter, state in self._optimizer.state.items():
            weights = parameter.clone()
            parameter.copy_(state["ax"])
            state["ax"].copy_(weights)

    def state_dict(self) -> dict[str, Any]:
        """The validation losses and the first averaged step, as JSON values."""
        return {"losses": self._losses, "begun": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._losses, self._start = list(state["losses"]), state["begun"]

    @property
    def _start(self) -> float:
        return self._optimizer.param_groups[0]["t0"]

    @_start.setter
    def _start(self, step: float) -> None:
        for group in self._optimizer.param_groups:
            group["t0"] = step


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's and Trainer's wrappers."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


@contextmanager
def scaled_learning_rate(optimizer: Any, factor: Tensor | float) -> Iterator[None]:
    """A context in which the learning rates of a possibly wrapped optimizer are multiplied by `factor`, also in ASGD's
    state, which has a copy of the rate of the previous step."""
    unwrapped = unwrap_optimizer(optimizer)
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
