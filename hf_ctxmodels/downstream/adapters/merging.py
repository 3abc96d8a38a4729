"""Merging of linear adapters into the linear layers before them."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.adapters.insertion import list_sublayer_adapters
from hf_ctxmodels.downstream.adapters.management import delete_adapter, get_adapter_set
from hf_ctxmodels.layers.cpu.linear import is_plain_linear

_OUTPUT_PROJECTIONS = {"attention": "out_proj", "cross_attention": "out_proj", "feed_forward": "down_proj"}


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, name: str) -> None:
    """Merge an adapter into the weights before it, and delete it; outputs in evaluation mode stay equal.

    The adapter must be a linear function of the sub-layer's output, for example
    `BottleneckConfig(original_ln_before=False, non_linearity="linear")`. With its projections D and U, their biases d
    and u and its scale s, the merged weight is (I + s U D) W and the merged bias is (I + s U D) b + s (U d + u).

    Raises:
        CtxError: The adapter is missing, not the only active one, or not linear; or a linear layer is wrapped,
            quantized or without a bias.
    """
    adapter_set = get_adapter_set(model)
    if name not in adapter_set.configs or adapter_set.active != (name,):
        raise CtxError(
            f"Only the single active adapter can be merged; active are {list(adapter_set.active) or 'none'}.",
            hint=f"call set_active_adapters(model, NAME) with one of {', '.join(adapter_set.configs) or 'none'}.",
        )
    config = adapter_set.configs[name]
    reasons = {
        f"its non-linearity is {config.non_linearity}": config.non_linearity.lower() not in ("linear", "identity"),
        "it reads the layer's norm (original_ln_before)": config.original_ln_before,
        "it reads the sub-layer's input (is_parallel)": config.is_parallel,
        "it has its own norm (ln_before, ln_after)": config.ln_before or config.ln_after,
        "the layer's sum does not follow it (original_ln_after)": not config.original_ln_after,
        "it is invertible (inv_adapter)": config.inv_adapter is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise CtxError(
                f"The adapter cannot be merged: {reason}.",
                hint='use a BottleneckConfig(original_ln_before=False, non_linearity="linear").',
            )
    pairs: list[tuple[Any, Any]] = []
    for block, sublayer, adapters in list_sublayer_adapters(adapter_set.base):
        if name not in adapters.members:
            continue
        linear = getattr(getattr(block.module, sublayer), _OUTPUT_PROJECTIONS[sublayer])
        if isinstance(adapters.members[name], nn.ModuleDict):
            raise CtxError("The adapter cannot be merged: a shared layer has an adapter for each depth.")
        if not is_plain_linear(linear):
            raise CtxError(
                f"The adapter cannot be merged into {type(linear).__name__}.",
                hint="merge before wrapping or quantizing.",
            )
        if linear.bias is None:
            raise CtxError(
                "The adapter cannot be merged: the linear layer before it has no bias.", hint="keep the adapter."
            )
        pairs.append((linear, adapters.members[name]))
    for linear, adapter in pairs:
        down, up = adapter.linear_down, adapter.adapter_up
        scale = torch.as_tensor(adapter.scaling, device=up.weight.device).double().reshape(-1, 1)
        product = scale * (up.weight.double() @ down.weight.double())
        offset = scale[:, 0] * (up.weight.double() @ down.bias.double() + up.bias.double())
        weight, bias = linear.weight.double(), linear.bias.double()
        linear.weight.copy_(weight + product @ weight)
        linear.bias.copy_(bias + product @ bias + offset)
    delete_adapter(model, name)
