"""Scalar mix of layers (Peters et al. 2018, section 3.2, equation 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init


class ScalarMix(nn.Module):
    """Weighted sum of layers, `gamma * sum_l softmax(weights)_l * layer_l`; initially their average.

    Args:
        layers: Number of layers.
        layer_norm: Normalise every layer to mean 0 and variance 1, over all values of its tokens, before mixing.
    """

    initializes_itself = True

    def __init__(self, layers: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        self.weights = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Initialise the mix to the average of the layers."""
        init.zeros_(self.weights)
        init.ones_(self.gamma)

    def distance(self) -> Tensor:
        """The squared distance of the weights from the average, their squared norm (section 3.4)."""
        return self.weights.float().square().sum()

    def forward(self, states: Sequence[Tensor], tokens: Tensor | None = None) -> Tensor:
        """Mix the layers.

        Args:
            states: (batch, length, width) states of each layer.
            tokens: (batch, length) bool, False at padding; None for no padding.
        """
        weights = self.weights.float().softmax(0) * self.gamma
        if self.layer_norm:
            states = [_normalise(layer, tokens) for layer in states]
        mixed = states[0] * weights[0].to(states[0].dtype)
        for layer, weight in zip(states[1:], weights[1:], strict=True):
            mixed = mixed + layer * weight.to(layer.dtype)
        return mixed


def _normalise(states: Tensor, tokens: Tensor | None) -> Tensor:
    """States of a layer with mean 0 and variance 1 over all tokens and dimensions of the batch; 0 at padding."""
    values = states.float()
    mask = torch.ones_like(values[..., :1]) if tokens is None else tokens[..., None].to(values.dtype)
    count = mask.sum() * values.shape[-1]
    mean = (values * mask).sum() / count
    centred = (values - mean) * mask
    return (centred / (centred.square().sum() / count + 1e-12).sqrt()).to(states.dtype)
