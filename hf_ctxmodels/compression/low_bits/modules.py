"""Linear maps and tables with weights of a few bits: as they are trained, and as they are stored."""

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
    """The values of codes of 8 bits with a scale for each token; the gradient passes straight through."""
    given = states.detach().reshape(-1, states.shape[-1]).float()
    values = quantize_tokens(given).dequantize().view(states.shape).to(states.dtype)
    return states + (values - states).detach() if torch.is_grad_enabled() and states.requires_grad else values


class FakeQuantizedLinear(nn.Linear):
    """A linear map that computes with the values of codes, while its weight is trained in single precision.

    Attributes:
        bits, groups: Of the weight's codes.
    """

    bits: int
    groups: int

    @classmethod
    def of(cls, module: nn.Linear, bits: int, groups: int) -> Self:
        """The map with the parameters of another."""
        made = cls(module.in_features, module.out_features, module.bias is not None, device="meta")
        made.weight, made.bias, made.bits, made.groups = module.weight, module.bias, bits, groups
        return made.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return fast_linear(round_activations(input), fake_quantize(self.weight, self.bits, self.groups), self.bias)


class FakeQuantizedEmbedding(nn.Embedding):
    """A table that gives the values of codes, while it is trained in single precision."""

    bits: int
    groups: int

    @classmethod
    def of(cls, module: nn.Embedding, bits: int, groups: int) -> Self:
        """The table with the parameters of another."""
        made = cls(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
        made.weight, made.bits, made.groups = module.weight, bits, groups
        return made.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        return F.embedding(input, fake_quantize(self.weight, self.bits, self.groups), self.padding_idx)


class _Packed(nn.Module):
    """Codes as they are stored.

    Attributes:
        packed: (bytes,) uint8, see `pack_bits`.
        least, step: (groups,) of `GroupCodes`.
    """

    def __init__(self, rows: int, columns: int, bits: int, groups: int) -> None:
        super().__init__()
        self.shape, self.bits, self.groups = (rows, columns), bits, groups
        number = count_groups(rows, groups)
        self.packed = _fixed(torch.empty(packed_size(rows * columns, bits), dtype=torch.uint8))
        self.least, self.step = _fixed(torch.empty(number)), _fixed(torch.empty(number))
        self._values: tuple[Any, Tensor] | None = None

    def store(self, weight: Tensor) -> Self:
        """Take the codes of a weight."""
        found = quantize_groups(weight, self.bits, self.groups)
        self.packed = _fixed(pack_bits(found.codes, self.bits))
        self.least, self.step = _fixed(found.least), _fixed(found.step)
        return self

    def values(self) -> Tensor:
        """(rows, columns) float32; made once and kept, for as long as the codes are the same."""
        if operators_are_intercepted():
            return self._made()
        version = tuple((each.data_ptr(), each._version) for each in (self.packed, self.least, self.step))
        if self._values is None or self._values[0] != version:
            self._values = (version, self._made())
        return self._values[1]

    def _made(self) -> Tensor:
        codes = unpack_bits(self.packed, self.bits, self.shape)
        return GroupCodes(codes, self.least.float(), self.step.float()).dequantize()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.shape}, bits={self.bits}, groups={self.groups}"


class PackedLinear(_Packed):
    """A linear map with a weight of a few bits, whose inputs have 8."""

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int, groups: int) -> None:
        super().__init__(out_features, in_features, bits, groups)
        self.bias = _fixed(torch.empty(out_features)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        check_not_trained(self)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return fast_linear(round_activations(input), self.values().to(input.dtype), bias)


class PackedEmbedding(_Packed):
    """A table of a few bits."""

    def __init__(self, num_embeddings: int, embedding_dim: int, bits: int, groups: int) -> None:
        super().__init__(num_embeddings, embedding_dim, bits, groups)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @property
    def weight(self) -> Tensor:
        """The values of the whole table."""
        return self.values()

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        check_not_trained(self)
        return F.embedding(input, self.values()).to(self.least.dtype)


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
