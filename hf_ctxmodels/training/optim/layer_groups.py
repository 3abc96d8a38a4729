"""Groups of parameters by depth, and discriminative fine-tuning: lower learning rates for lower layers (Howard & Ruder
2018, section 3.2)."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError

LAYERS = "layers"  # the name of every encoder's stack
STACKS = ("encoder", "decoder")  # the parts of an encoder-decoder that have one each, in the order of application
LAYER = re.compile(rf"(?P<part>(?:(?:{'|'.join(STACKS)})\.)?{LAYERS}\.(?P<number>\d+))\.")
"""Begins the names of a layer's parameters in the encoder."""

_EMBEDDINGS, _HEADS = -1.0, float("inf")  # depths of what is below the layers, and above them


class _Stack(NamedTuple):
    """A stack of layers of a base model.

    Attributes:
        prefix: Of the names of its parameters; empty for the base model's own.
        lowest: Depth of its lowest layer.
        above: Names of its modules that follow the layers.
        top: Depth of these: of what reads them.
    """

    prefix: str
    lowest: int
    above: tuple[str, ...]
    top: float


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Non-empty groups of trainable parameters by depth: the embeddings, each layer from the lowest up, the heads.

    The layers of an encoder-decoder are the encoder's and then the decoder's. Other modules of a stack belong to the
    embeddings if they precede its layers, else to the group above: the decoder's first layer, or the heads. Layers
    that share all parameters are one group.
    """
    groups = _by_depth(model)
    return [groups[depth] for depth in sorted(groups)]


def has_heads(model: PreTrainedModel) -> bool:
    """Whether the last of the `layer_groups` is that of the heads; of a bare encoder it may be the last layer."""
    return _HEADS in _by_depth(model)


def require_layers(model: PreTrainedModel) -> None:
    """Raise CtxError for an encoder whose layers are not known: its depths would all be one.

    Word vectors have none either, but the table and the heads are two depths.
    """
    base = model.base_model
    owners = [module for module in base.modules() if any(True for _ in module.parameters(recurse=False))]
    if not _stacks(base) and not all(isinstance(module, nn.Embedding) for module in owners):
        raise CtxError(
            f"{type(base).__name__} has no stack `{LAYERS}`, so that the depths of its weights are not known.",
            location="--layerwise_lr_decay, --unfreeze_steps or --thaw",
            hint="leave them out, or take a family of this package.",
        )


def _stacks(base: nn.Module) -> list[_Stack]:
    """The stacks of a base model, from the lowest up."""
    parts = dict(base.named_children())
    stacks = [name for name in STACKS if name in parts and LAYERS in dict(parts[name].named_children())]
    names = [""] if LAYERS in parts else stacks
    found: list[_Stack] = []
    depth = 0
    for name in names:
        part: Any = base.get_submodule(name)
        children = [child for child, _ in part.named_children()]
        above = tuple(children[children.index(LAYERS) + 1 :])
        first, depth = depth, depth + len(part.layers)
        found.append(_Stack(f"{name}." if name else "", first, above, _HEADS if name == names[-1] else depth))
    return found


def _depth(name: str, stacks: Sequence[_Stack]) -> float:
    """The depth of a base model's parameter."""
    for stack in stacks:
        if name.startswith(stack.prefix):
            child, *others = name.removeprefix(stack.prefix).split(".")
            if child == LAYERS:
                return float(stack.lowest + int(others[0]))
            return stack.top if child in stack.above else _EMBEDDINGS
    return _EMBEDDINGS


def _by_depth(model: PreTrainedModel) -> dict[float, list[nn.Parameter]]:
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    stacks = _stacks(base)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = name.startswith(prefix)
            depth = _depth(name.removeprefix(prefix), stacks) if inside else _HEADS
            groups.setdefault(depth, []).append(parameter)
    return groups


def group_rates(groups: Sequence[Any], learning_rate: float, decay: float) -> list[float]:
    """The learning rate of each group: `learning_rate` for the last, else that of the next group / `decay`."""
    return [learning_rate / decay ** (len(groups) - 1 - depth) for depth in range(len(groups))]
