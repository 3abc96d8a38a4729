"""Low-bit weights: group-wise quantization, and linear layers and embeddings for training and with packed codes.

A group of consecutive output rows has a range [minimum, maximum], divided into 2^bits - 1 steps; a weight is
`minimum + code * step` (Q-BERT, Shen et al. 2019, equation 2 and section 3.2).
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.compression.int8.modules import check_not_trained, fixed, quantize_tokens
from hf_ctxmodels.layers.cpu.linear import fast_linear, operators_are_intercepted

MIN_BITS, MAX_BITS = 2, 8


class GroupCodes(NamedTuple):
    """(rows, columns) uint8 codes, and (groups,) values of code 0 and differences of consecutive codes."""

    codes: Tensor
    minimum: Tensor
    step: Tensor

    def dequantize(self) -> Tensor:
        """(rows, columns) float32."""
        minimum, step = (_expand_to_rows(values, len(self.codes)) for values in (self.minimum, self.step))
        return minimum + self.codes * step


def _expand_to_rows(values: Tensor, rows: int) -> Tensor:
    """(groups,) -> (rows, 1); the last group may have fewer rows."""
    return values.repeat_interleave(-(-rows // len(values)))[:rows, None]


def quantize_groups(weight: Tensor, bits: int, groups: int) -> GroupCodes:
    """Quantize a (rows, columns) weight to 2 to 8 bits in groups of rows, at most one for each row."""
    codes, minimum, step = _float_codes(weight, bits, groups)
    return GroupCodes(codes.flatten(0, 1)[: len(weight)].to(torch.uint8), minimum.flatten(), step.flatten())


def fake_quantize(weight: Tensor, bits: int, groups: int) -> Tensor:
    """The dequantized weight, with a straight-through gradient (Bengio et al. 2013, arXiv 1308.3432; Q-BERT's equation
    3)."""
    codes, minimum, step = _float_codes(weight, bits, groups)
    values = codes.mul_(step).add_(minimum).flatten(0, 1)[: len(weight)]
    return _StraightThrough.apply(weight, values.to(weight.dtype))


@torch.no_grad()
def _float_codes(weight: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(groups, rows, columns) float32 codes, and (groups, 1, 1) values of code 0 and differences of consecutive codes.

    If the last group has fewer rows than the others, the last row of the weight is repeated.
    """
    weight = weight.float()
    group_rows = -(-len(weight) // groups)
    if missing_rows := -len(weight) % group_rows:
        weight = torch.cat([weight, weight[-1:].expand(missing_rows, -1)])
    weight = weight.view(-1, group_rows, weight.shape[1])
    minimum, maximum = (values[:, None, None] for values in weight.flatten(1).aminmax(dim=1))
    step = (maximum - minimum) / (2**bits - 1)
    step = step.where(step > 0, 1.0)
    return (weight - minimum).div_(step).round_().clamp_(0, 2**bits - 1), minimum, step


class _StraightThrough(torch.autograd.Function):
    """The second argument, with the derivative of the identity with respect to the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Nothing to save: the method makes the function usable in `torch.func`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into (bytes,) uint8 with `bits` bits for each code, the lowest bit first."""
    positions = torch.arange(bits, device=codes.device)
    stream = (codes.flatten()[:, None].int() >> positions) & 1
    stream = F.pad(stream.flatten(), (0, -stream.numel() % 8)).view(-1, 8)
    return (stream << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """The inverse of `pack_bits`: uint8 codes of a shape."""
    num_codes = shape[0] * shape[1]
    powers = 2 ** torch.arange(8, dtype=torch.int32, device=packed.device)
    stream = torch.div(packed[:, None].int(), powers, rounding_mode="floor") % 2  # ONNX has no shift of signed integers
    stream = stream.flatten()[: num_codes * bits].view(num_codes, bits)
    return (stream * powers[:bits]).sum(1).to(torch.uint8).view(shape)


def round_activations(states: Tensor) -> Tensor:
    """Fake-quantize activations to 8 bits with one scale per token, with a straight-through gradient."""
    rows = states.detach().reshape(-1, states.shape[-1]).float()
    values = quantize_tokens(rows).dequantize().view(states.shape).to(states.dtype)
    return _StraightThrough.apply(states, values)


class FakeQuantizedLinear(nn.Linear):
    """Linear layer that computes with the dequantized weight, while the weight is trained in float32."""

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
    """Packed codes (bytes,) uint8 of a weight, see `pack_bits`, and the (groups,) minimum and step of `GroupCodes`."""

    has_quantized_weights = True

    def __init__(self, rows: int, columns: int, bits: int, groups: int) -> None:
        super().__init__()
        self.shape, self.bits, self.groups = (rows, columns), bits, groups
        num_groups = -(-rows // -(-rows // groups))  # at most one for each row
        self.packed = fixed(torch.empty(-(-rows * columns * bits // 8), dtype=torch.uint8))
        self.least, self.step = fixed(torch.empty(num_groups)), fixed(torch.empty(num_groups))
        self._values: tuple[Any, Tensor] | None = None

    def store(self, weight: Tensor) -> Self:
        """Quantize and pack a weight."""
        quantized = quantize_groups(weight, self.bits, self.groups)
        self.packed = fixed(pack_bits(quantized.codes, self.bits))
        self.least, self.step = fixed(quantized.minimum), fixed(quantized.step)
        return self

    def values(self) -> Tensor:
        """(rows, columns) float32 dequantized weight, cached until the codes change."""
        version = None
        if not operators_are_intercepted():
            version = tuple((values.data_ptr(), values._version) for values in (self.packed, self.least, self.step))
            if self._values is not None and self._values[0] == version:
                return self._values[1]
        codes = unpack_bits(self.packed, self.bits, self.shape)
        weight = GroupCodes(codes, self.least.float(), self.step.float()).dequantize()
        self._values = None if version is None else (version, weight)
        return weight

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.shape}, bits={self.bits}, groups={self.groups}"


class PackedLinear(_Packed):
    """Linear layer with a packed low-bit weight and 8-bit inputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int, groups: int) -> None:
        super().__init__(out_features, in_features, bits, groups)
        self.bias = fixed(torch.empty(out_features)) if bias else None

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
