"""Activations by name."""

from torch import nn
from transformers.activations import ACT2FN


def get_activation(name: str) -> nn.Module:
    """An activation by its name in transformers ("gelu", "relu", ...).

    "gelu_new", the tanh approximation of GELU, is torch's single operation here, eight elementwise operations there.
    """
    return nn.GELU(approximate="tanh") if name == "gelu_new" else ACT2FN[name]
