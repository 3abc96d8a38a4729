"""Groups of parameters by depth, and discriminative fine-tuning: lower learning rates for lower layers (Howard & Ruder
2018, section 3.2)."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

LAYERS = "layers"  # the name of every encoder's stack
_HEADS = float("inf")  # depth of what is above it


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Non-empty groups of trainable parameters by depth: the embeddings, each layer from the lowest up, the heads.

    Other modules of an encoder belong to the embeddings if they precede the layers, else to the heads. Layers that
    share all parameters are one group.
    """
    groups = _by_depth(model)
    return [groups[depth] for depth in sorted(groups)]


def has_heads(model: PreTrainedModel) -> bool:
    """Whether the last of the `layer_groups` is that of the heads; of a bare encoder it may be the last layer."""
    return _HEADS in _by_depth(model)


def _by_depth(model: PreTrainedModel) -> dict[float, list[nn.Parameter]]:
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    children = [name for name, _ in base.named_children()]
    above = set(children[children.index(LAYERS) + 1 :]) if LAYERS in children else set()
    numbered = re.compile(rf"{re.escape(prefix)}{LAYERS}\.(\d+)\.")
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = numbered.match(name)
        if match:
            depth = float(match[1])
        elif name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] not in above:
            depth = -1.0
        else:
            depth = _HEADS
        groups.setdefault(depth, []).append(parameter)
    return groups


def group_rates(groups: Sequence[Any], learning_rate: float, decay: float) -> list[float]:
    """The learning rate of each group: `learning_rate` for the last, else that of the next group / `decay`."""
    return [learning_rate / decay ** (len(groups) - 1 - depth) for depth in range(len(groups))]
