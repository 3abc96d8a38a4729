"""Groups of parameters by depth, and their learning rates in discriminative fine-tuning (Howard & Ruder 2018, section
3.2)."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError

LAYERS = "layers"  # attribute of an encoder with its stack of layers
STACKS = ("encoder", "decoder")  # submodules of an encoder-decoder with a stack each, in the order of application
LAYER = re.compile(rf"(?P<part>(?:(?:{'|'.join(STACKS)})\.)?{LAYERS}\.(?P<number>\d+))\.")
"""Prefix of the names of a layer's parameters in the encoder."""

_EMBEDDINGS, _HEADS = -1.0, float("inf")  # depths of the modules below and above the layers


class _Stack(NamedTuple):
    """A stack of layers of a base model.

    Attributes:
        prefix: Prefix of the names of its parameters; empty for the base model's own.
        lowest: Depth of its lowest layer.
        above: Names of its modules that follow the layers.
        top: Depth of these modules: the depth of the module that reads them.
    """

    prefix: str
    lowest: int
    above: tuple[str, ...]
    top: float


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Non-empty groups of trainable parameters by depth: the embeddings, each layer from the lowest up, the heads.

    The layers of an encoder-decoder are the encoder's followed by the decoder's. Other modules of a stack belong to the
    embeddings if they precede its layers, else to the group above: the decoder's first layer, or the heads. Layers
    that share all parameters are one group.
    """
    groups = _parameters_by_depth(model)
    return [groups[depth] for depth in sorted(groups)]


def has_heads(model: PreTrainedModel) -> bool:
    """Whether the last of the `layer_groups` is the heads; for a base model it may be the last layer."""
    return _HEADS in _parameters_by_depth(model)


def require_layers(model: PreTrainedModel) -> None:
    """Raise CtxError if the encoder's stack of layers is unknown, so that all its parameters would have one depth.

    Word vectors have no layers either, but two depths: the embeddings and the heads.
    """
    base = model.base_model
    owners = [module for module in base.modules() if any(True for _ in module.parameters(recurse=False))]
    if not _stacks(base) and not all(isinstance(module, nn.Embedding) for module in owners):
        raise CtxError(
            f"{type(base).__name__} has no stack `{LAYERS}`, so the depths of its weights are unknown.",
            location="--layerwise_lr_decay or --freeze",
            hint="remove them, or use a family of this package.",
        )


def group_rates(groups: Sequence[Any], learning_rate: float, decay: float) -> list[float]:
    """The learning rate of each group: `learning_rate` for the last, else the rate of the next group / `decay`."""
    return [learning_rate / decay ** (len(groups) - 1 - depth) for depth in range(len(groups))]


def _stacks(base: nn.Module) -> list[_Stack]:
    """The stacks of a base model, from the lowest up."""
    children = dict(base.named_children())
    if LAYERS in children:
        names = [""]
    else:
        names = [name for name in STACKS if name in children and LAYERS in dict(children[name].named_children())]
    stacks: list[_Stack] = []
    depth = 0
    for name in names:
        module: Any = base.get_submodule(name)
        child_names = [child for child, _ in module.named_children()]
        above = tuple(child_names[child_names.index(LAYERS) + 1 :])
        lowest, depth = depth, depth + len(module.layers)
        stacks.append(_Stack(f"{name}." if name else "", lowest, above, _HEADS if name == names[-1] else depth))
    return stacks


def _depth(name: str, stacks: Sequence[_Stack]) -> float:
    """The depth of a base model's parameter."""
    for stack in stacks:
        if name.startswith(stack.prefix):
            child, *path = name.removeprefix(stack.prefix).split(".")
            if child == LAYERS:
                return float(stack.lowest + int(path[0]))
            return stack.top if child in stack.above else _EMBEDDINGS
    return _EMBEDDINGS


def _parameters_by_depth(model: PreTrainedModel) -> dict[float, list[nn.Parameter]]:
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    stacks = _stacks(base)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            depth = _depth(name.removeprefix(prefix), stacks) if name.startswith(prefix) else _HEADS
            groups.setdefault(depth, []).append(parameter)
    return groups
