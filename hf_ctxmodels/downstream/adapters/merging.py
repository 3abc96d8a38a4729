"""Merging of linear adapters into the maps below them."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.adapters.insertion import slots
from hf_ctxmodels.downstream.adapters.model import delete_adapter, get_adapter_set
from hf_ctxmodels.layers.adapters import LINEAR, BottleneckAdapter, BottleneckConfig
from hf_ctxmodels.layers.cpu.linear import is_plain_linear

_MAPS = {"attention": "out_proj", "cross_attention": "out_proj", "feed_forward": "down_proj"}


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, name: str) -> None:
    """Put an adapter into the weights of the maps before it, and delete it: outputs in evaluation mode are the same.

    That is possible where the adapter is a linear function of the sub-layer's output: Houlsby's places with
    `non_linearity="linear"`.

    Raises:
        CtxError: The adapter is missing, not active by itself, or not linear; or a map is not the model's own.
    """
    known = get_adapter_set(model)
    if name not in known.configs or known.active != (name,):
        raise CtxError(
            f"Only an adapter that is active by itself can be merged, and active are {list(known.active) or 'none'}.",
            hint=f"set_active_adapters(model, {name!r}) with one of {', '.join(known.configs) or 'none'}.",
        )
    _check_linear(known.configs[name])
    found = [
        (block.module, place, slot.members[name]) for block, place, slot in slots(known.base) if name in slot.members
    ]
    for block, place, adapter in found:
        _check_map(getattr(getattr(block, place), _MAPS[place]), adapter)
    for block, place, adapter in found:
        _merge(getattr(getattr(block, place), _MAPS[place]), adapter)  # type: ignore[arg-type]
    delete_adapter(model, name)


def _check_linear(config: BottleneckConfig) -> None:
    reasons = {
        f"its non-linearity is {config.non_linearity}": config.non_linearity.lower() not in LINEAR,
        "it reads the layer's norm or input (original_ln_before)": config.original_ln_before,
        "it reads the sub-layer's input (is_parallel)": config.is_parallel,
        "it has a norm of its own": config.ln_before or config.ln_after,
        "it leaves out the layer's sum (original_ln_after)": not config.original_ln_after,
        "it is invertible": config.inv_adapter is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise CtxError(
                f"The adapter cannot be merged: {reason}.",
                hint='only BottleneckConfig(original_ln_before=False, non_linearity="linear") and its like can.',
            )


def _check_map(linear: Any, adapter: nn.Module) -> None:
    if isinstance(adapter, nn.ModuleDict):
        raise CtxError("The adapter cannot be merged: a shared layer has one for each depth.")
    if not is_plain_linear(linear):
        raise CtxError(
            f"The adapter cannot be merged into {type(linear).__name__}.", hint="merge before wrapping or quantizing."
        )
    if linear.bias is None:
        raise CtxError("The adapter cannot be merged: the map before it has no bias.", hint="keep the adapter.")


def _merge(linear: nn.Linear, adapter: BottleneckAdapter) -> None:
    """W' = (I + s U D) W and b' = (I + s U D) b + s (U d + u), in double precision."""
    down, up = adapter.linear_down, adapter.adapter_up
    scale = torch.as_tensor(adapter.scaling, device=up.weight.device).double().reshape(-1, 1)
    product = scale * (up.weight.double() @ down.weight.double())
    offset = scale[:, 0] * (up.weight.double() @ down.bias.double() + up.bias.double())
    weight, bias = linear.weight.double(), linear.bias.double()
    linear.weight.copy_(weight + product @ weight)
    linear.bias.copy_(bias + product @ bias + offset)
