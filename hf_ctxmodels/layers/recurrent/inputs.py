"""The products of a recurrence's inputs, of all steps at once."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.cpu.linear import fast_linear, linear


def multiply_inputs(layer: Any, packed: Tensor, bias: Tensor) -> Tensor:
    """The part of the gates that does not depend on the state.

    Args:
        layer: Has an `input_weight` of (directions, gates, input), or in its place `input_maps`, a map for each
            direction.
        packed: (directions, tokens, input).
        bias: (directions, gates).

    Returns:
        (directions, tokens, gates).
    """
    maps = getattr(layer, "input_maps", None)
    if maps is not None:
        return torch.stack([linear(each, states) for each, states in zip(maps, packed)]) + bias[:, None]
    parts = zip(bias, packed, layer.input_weight.to(packed.dtype))
    return torch.stack([fast_linear(states, weight, bias) for bias, states, weight in parts])
