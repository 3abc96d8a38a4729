"""Codes of groups of rows, and their bits in a file.

A group of neighbouring output rows has a range [least, largest], divided into 2^bits - 1 steps; a weight is
`least + code * step` (Shen et al. 2019, equation 2 and section 3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

FEWEST, MOST = 2, 8  # bits


class GroupCodes(NamedTuple):
    """Codes of a weight.

    Attributes:
        codes: (rows, columns) uint8.
        least, step: (groups,) the value of code 0, and the distance of two codes.
    """

    codes: Tensor
    least: Tensor
    step: Tensor

    def dequantize(self) -> Tensor:
        """(rows, columns) float32."""
        least, step = (_of_rows(each, len(self.codes)) for each in (self.least, self.step))
        return least + self.codes * step


def rows_in_group(rows: int, groups: int) -> int:
    """Rows of a group: all have as many, but for the last."""
    return -(-rows // groups)


def count_groups(rows: int, groups: int) -> int:
    """Groups that there are: at most one for each row."""
    return -(-rows // rows_in_group(rows, groups))


def _of_rows(of_groups: Tensor, rows: int) -> Tensor:
    """(rows, 1) of (groups,)."""
    return of_groups.repeat_interleave(rows_in_group(rows, len(of_groups)))[:rows, None]


@torch.no_grad()
def quantize_groups(weight: Tensor, bits: int, groups: int) -> GroupCodes:
    """Codes of a weight.

    Args:
        weight: (rows, columns).
        bits: From 2 to 8.
        groups: Number of groups of rows; fewer where there are fewer rows.
    """
    weight = weight.detach().float()
    size, rows = rows_in_group(len(weight), groups), len(weight)
    parts = weight.split(size)
    least, largest = (torch.stack([getattr(part, name)() for part in parts]) for name in ("amin", "amax"))
    step = (largest - least) / (2**bits - 1)
    step = step.where(step > 0, 1.0)
    codes = ((weight - _of_rows(least, rows)) / _of_rows(step, rows)).round_().clamp_(0, 2**bits - 1)
    return GroupCodes(codes.to(torch.uint8), least, step)


def fake_quantize(weight: Tensor, bits: int, groups: int) -> Tensor:
    """The values of the codes of a weight, with the gradient of the weight itself (straight-through: Bengio et al.
    2013, arXiv 1308.3432; Q-BERT's equation 3)."""
    values = quantize_groups(weight, bits, groups).dequantize().to(weight.dtype)
    return weight + (values - weight).detach() if torch.is_grad_enabled() and weight.requires_grad else values


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Any number of codes -> (bytes,) uint8 with `bits` for each code, the lowest first."""
    places = torch.arange(bits, device=codes.device)
    stream = (codes.flatten()[:, None].int() >> places) & 1
    stream = torch.nn.functional.pad(stream.flatten(), (0, -stream.numel() % 8)).view(-1, 8)
    return (stream << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def packed_size(codes: int, bits: int) -> int:
    """Bytes of so many codes."""
    return -(-codes * bits // 8)


def unpack_bits(packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """The inverse of `pack_bits`: uint8 codes of a shape."""
    number = shape[0] * shape[1]
    powers = 2 ** torch.arange(8, dtype=torch.int32, device=packed.device)
    stream = torch.div(packed[:, None].int(), powers, rounding_mode="floor") % 2  # ONNX has no shift of signed integers
    stream = stream.flatten()[: number * bits].view(number, bits)
    return (stream * powers[:bits]).sum(1).to(torch.uint8).view(shape)
