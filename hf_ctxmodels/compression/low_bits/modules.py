"""Linear layers and embeddings with low-bit weights: fake-quantized for training, and packed."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.compression.int8.quantization import check_not_trained, quantize_tokens
from hf_ctxmodels.compression.low_bits.group_quantization import (
    GroupCodes,
    count_groups,
    fake_quantize,
    pack_bits,
    packed_size,
    quantize_groups,
    unpack_bits,
)
from hf_ctxmodels.layers.cpu.linear import fast_linear, operators_are_intercepted


def round_activations(states: Tensor) -> Tensor:
    """Fake-quantize activations to 8 bits with one scale per token, with a straight-through gradient."""
    rows = states.detach().reshape(-1, states.shape[-1]).float()
    values = quantize_tokens(rows).dequantize().view(states.shape).to(states.dtype)
    return states + (values - states).detach() if torch.is_grad_enabled() and states.requires_grad else values


class FakeQuantizedLinear(nn.Linear):
    """Linear layer that computes with the dequantized weight, while the weight is trained in float32.

    Attributes:
        bits, groups: As in `quantize_groups`.
    """

    bits: int
    groups: int

    @classmethod
    def from_module(cls, module: nn.Linear, bits: int, groups: int) -> Self:
        """The layer with the parameters of a linear layer."""
        layer = cls(module.in_features, module.out_features, module.bias is not None, device="meta")
        layer.weight, layer.bias, layer.bits, layer.groups = module.weight, module.bias, bits, groups
        return layer.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return fast_linear(round_activations(input), fake_quantize(self.weight, self.bits, self.groups), self.bias)


class FakeQuantizedEmbedding(nn.Embedding):
    """Embedding that returns dequantized weights, while the weight is trained in float32."""

    bits: int
    groups: int

    @classmethod
    def from_module(cls, module: nn.Embedding, bits: int, groups: int) -> Self:
        """The embedding with the parameters of another embedding."""
        layer = cls(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
        layer.weight, layer.bits, layer.groups = module.weight, bits, groups
        return layer.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        return F.embedding(input, fake_quantize(self.weight, self.bits, self.groups), self.padding_idx)


class _Packed(nn.Module):
    """Packed codes of a weight.

    Attributes:
        packed: (bytes,) uint8, see `pack_bits`.
        least, step: (groups,) minimum and step, see `GroupCodes`.
    """

    def __init__(self, rows: int, columns: int, bits: int, groups: int) -> None:
        super().__init__()
        self.shape, self.bits, self.groups = (rows, columns), bits, groups
        num_groups = count_groups(rows, groups)
        self.packed = _fixed(torch.empty(packed_size(rows * columns, bits), dtype=torch.uint8))
        self.least, self.step = _fixed(torch.empty(num_groups)), _fixed(torch.empty(num_groups))
        self._values: tuple[Any, Tensor] | None = None

    def store(self, weight: Tensor) -> Self:
        """Quantize and pack a weight."""
        quantized = quantize_groups(weight, self.bits, self.groups)
        self.packed = _fixed(pack_bits(quantized.codes, self.bits))
        self.least, self.step = _fixed(quantized.minimum), _fixed(quantized.step)
        return self

    def values(self) -> Tensor:
        """(rows, columns) float32 dequantized weight, cached until the codes change."""
        if operators_are_intercepted():
            return self._dequantize()
        version = tuple((values.data_ptr(), values._version) for values in (self.packed, self.least, self.step))
        if self._values is None or self._values[0] != version:
            self._values = (version, self._dequantize())
        return self._values[1]

    def _dequantize(self) -> Tensor:
        codes = unpack_bits(self.packed, self.bits, self.shape)
        return GroupCodes(codes, self.least.float(), self.step.float()).dequantize()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.shape}, bits={self.bits}, groups={self.groups}"


class PackedLinear(_Packed):
    """Linear layer with a packed low-bit weight and 8-bit inputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int, groups: int) -> None:
        super().__init__(out_features, in_features, bits, groups)
        self.bias = _fixed(torch.empty(out_features)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        check_not_trained(self)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return fast_linear(round_activations(input), self.values().to(input.dtype), bias)


class PackedEmbedding(_Packed):
    """Embedding with a packed low-bit weight."""

    def __init__(self, num_embeddings: int, embedding_dim: int, bits: int, groups: int) -> None:
        super().__init__(num_embeddings, embedding_dim, bits, groups)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @property
    def weight(self) -> Tensor:
        """The dequantized weight."""
        return self.values()

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        check_not_trained(self)
        return F.embedding(input, self.values()).to(self.least.dtype)


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
