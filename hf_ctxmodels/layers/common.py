"""Small modules and functions: activations, norms, embedding matrices, hook points, the mix of layers, and the output
of decoders."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN


def get_activation(name: str) -> nn.Module:
    """An activation by its name in transformers; "gelu_new" is one operation of torch here, eight there."""
    if name in ("gelu", "gelu_new"):
        return nn.GELU(approximate="none" if name == "gelu" else "tanh")
    return ACT2FN[name]


class SafeBatchNorm1d(nn.BatchNorm1d):
    """Batch normalization that uses the running statistics for a single row, which has no variance."""

    def forward(self, input: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        if self.training and len(input) == 1:
            statistics = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(input, *statistics, training=False, eps=self.eps)
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    """Scaling to a root mean square of 1, without a mean and without a bias (Zhang & Sennrich 2019, arXiv 1910.07467,
    equation 4).

    The mean square is computed in float32, as in T5: squares of half-precision states would overflow float16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) -> (..., width), in the dtype of the weight."""
        scaled = F.rms_norm(input.float(), self.normalized_shape, None, self.eps)
        return self.weight * scaled.to(self.weight.dtype)


def embedding_matrix(embeddings: nn.Module, num_embeddings: int) -> Tensor:
    """(num_embeddings, width) the vectors that `embeddings` returns for all ids.

    An output layer that is tied to embeddings reads them by this function, because PEFT replaces an `nn.Embedding` by
    a module whose `weight` is not adapted.
    """
    if type(embeddings) is nn.Embedding:
        return embeddings.weight
    parameter = next(embeddings.parameters())
    return embeddings(torch.arange(num_embeddings, device=parameter.device))


class HookPoint(nn.Identity):
    """The identity: the output of the embeddings, or the input of an output layer, as a named module for forward hooks,
    so that adapters and explanation tools can change the tensor."""


class ScalarMix(nn.Module):
    """Weighted sum of layers, `gamma * sum_l softmax(weights)_l * layer_l`; initially their average (Peters et al.
    2018, section 3.2, equation 1).

    With `layer_norm`, every layer is first normalized to mean 0 and variance 1, over all values of its tokens. Layers
    whose width differs from the width of the last layer, such as the inner layers of AWD-LSTM, are excluded.
    """

    initializes_itself = True

    def __init__(self, layers: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        self.weights = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Initialize the mix to the average of the layers."""
        init.zeros_(self.weights)
        init.ones_(self.gamma)

    def shares(self) -> list[float]:
        """The share of each layer in the sum, the softmax of the weights."""
        return self.weights.detach().float().softmax(0).tolist()

    def distance(self) -> Tensor:
        """Squared norm of the weights, the distance from the average (Peters et al. 2018, section 3.3)."""
        return self.weights.float().square().sum()

    def forward(self, states: Sequence[Tensor], token_mask: Tensor | None = None) -> Tensor:
        """Mix (batch, length, width) states of each layer; `token_mask` (batch, length) bool is False at padding."""
        included = [
            layer for layer, layer_states in enumerate(states) if layer_states.shape[-1] == states[-1].shape[-1]
        ]
        weights = torch.stack([self.weights[layer] for layer in included]).float().softmax(0) * self.gamma
        states = [states[layer] for layer in included]
        if self.layer_norm:
            states = [_normalize(layer, token_mask) for layer in states]
        mixed = states[0] * weights[0].to(states[0].dtype)
        for layer, weight in zip(states[1:], weights[1:], strict=True):
            mixed = mixed + layer * weight.to(layer.dtype)
        return mixed


def layer_shares(model: nn.Module) -> dict[str, list[float]]:
    """The shares of the layers in each `ScalarMix` of a model, by the name of the module."""
    return {name: module.shares() for name, module in model.named_modules() if isinstance(module, ScalarMix)}


def _normalize(states: Tensor, token_mask: Tensor | None) -> Tensor:
    """States of a layer with mean 0 and variance 1 over all tokens and dimensions of the batch; 0 at padding."""
    values = states.float()
    mask = torch.ones_like(values[..., :1]) if token_mask is None else token_mask[..., None].to(values.dtype)
    count = mask.sum() * values.shape[-1]
    mean = (values * mask).sum() / count
    centered = (values - mean) * mask
    return (centered / (centered.square().sum() / count + 1e-12).sqrt()).to(states.dtype)


class RecurrentDecoderOutput(NamedTuple):
    """Output of a recurrent decoder of an encoder-decoder.

    Attributes:
        states: (batch, steps, hidden) from which the next tokens are predicted; or (targets, hidden) at target
            positions.
        cache: The state after the last token; None if it was not computed.
        hidden_states: If recorded, layers + 1 tensors (batch, steps, width): the tokens' embeddings, the output of
            every layer except the last, and the states from which the next tokens are predicted, before dropout.
        cross_attentions: If recorded, the (batch, 1, steps, length) weights of the source tokens for each attention.
    """

    states: Tensor
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
