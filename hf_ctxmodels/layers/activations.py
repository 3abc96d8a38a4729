"""Activations by name."""

from torch import nn
from transformers.activations import ACT2FN


def get_activation(name: str) -> nn.Module:
    """An activation by transformers' name (`gelu`, `relu`, ...). For `gelu_new`, the tanh approximation of GELU, it is
    torch's single operation in place of the eight elementwise operations there."""
    return nn.GELU(approximate="tanh") if name == "gelu_new" else ACT2FN[name]
