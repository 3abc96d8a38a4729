"""Group-wise quantization of weights, and packing of the integer codes.

A group of consecutive output rows has a range [minimum, maximum], divided into 2^bits - 1 steps; a weight is
`minimum + code * step` (Shen et al. 2019, equation 2 and section 3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

MIN_BITS, MAX_BITS = 2, 8


class GroupCodes(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: (rows, columns) uint8.
        minimum, step: (groups,) the value of code 0, and the difference of consecutive codes.
    """

    codes: Tensor
    minimum: Tensor
    step: Tensor

    def dequantize(self) -> Tensor:
        """(rows, columns) float32."""
        minimum, step = (_expand_to_rows(values, len(self.codes)) for values in (self.minimum, self.step))
        return minimum + self.codes * step


def rows_in_group(rows: int, groups: int) -> int:
    """Number of rows in a group; the last group may have fewer."""
    return -(-rows // groups)


def count_groups(rows: int, groups: int) -> int:
    """Number of groups, at most one for each row."""
    return -(-rows // rows_in_group(rows, groups))


def _expand_to_rows(values: Tensor, rows: int) -> Tensor:
    """(groups,) -> (rows, 1)."""
    return values.repeat_interleave(rows_in_group(rows, len(values)))[:rows, None]


@torch.no_grad()
def quantize_groups(weight: Tensor, bits: int, groups: int) -> GroupCodes:
    """Quantize a weight.

    Args:
        weight: (rows, columns).
        bits: Bits per weight, 2 to 8.
        groups: Number of groups of rows, at most one for each row.
    """
    weight = weight.detach().float()
    rows = len(weight)
    row_groups = weight.split(rows_in_group(rows, groups))
    minimum = torch.stack([group.amin() for group in row_groups])
    maximum = torch.stack([group.amax() for group in row_groups])
    step = (maximum - minimum) / (2**bits - 1)
    step = step.where(step > 0, 1.0)
    codes = ((weight - _expand_to_rows(minimum, rows)) / _expand_to_rows(step, rows)).round_().clamp_(0, 2**bits - 1)
    return GroupCodes(codes.to(torch.uint8), minimum, step)


def fake_quantize(weight: Tensor, bits: int, groups: int) -> Tensor:
    """The dequantized weight, with a straight-through gradient (Bengio et al. 2013, arXiv 1308.3432; Q-BERT's equation
    3)."""
    values = quantize_groups(weight, bits, groups).dequantize().to(weight.dtype)
    return weight + (values - weight).detach() if torch.is_grad_enabled() and weight.requires_grad else values


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into (bytes,) uint8 with `bits` bits for each code, the lowest bit first."""
    positions = torch.arange(bits, device=codes.device)
    stream = (codes.flatten()[:, None].int() >> positions) & 1
    stream = torch.nn.functional.pad(stream.flatten(), (0, -stream.numel() % 8)).view(-1, 8)
    return (stream << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def packed_size(num_codes: int, bits: int) -> int:
    """Number of bytes of packed codes."""
    return -(-num_codes * bits // 8)


def unpack_bits(packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """The inverse of `pack_bits`: uint8 codes of a shape."""
    num_codes = shape[0] * shape[1]
    powers = 2 ** torch.arange(8, dtype=torch.int32, device=packed.device)
    stream = torch.div(packed[:, None].int(), powers, rounding_mode="floor") % 2  # ONNX has no shift of signed integers
    stream = stream.flatten()[: num_codes * bits].view(num_codes, bits)
    return (stream * powers[:bits]).sum(1).to(torch.uint8).view(shape)
