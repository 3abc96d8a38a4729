"""Dropout (Srivastava et al. 2014), fast on a CPU.

There torch draws the numbers one by one on one thread, and stores a floating-point mask: about a tenth of a training
step's time and memory. Here one 64-bit draw decides four elements, and the mask is in bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DROPOUT_LEVELS = 1 << 16  # an element is dropped by 16 random bits


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` by `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...), unchanged in evaluation mode."""
        return dropout(input, self.p, self.training)


def dropout(tensor: Tensor, p: float, training: bool) -> Tensor:
    """Zero elements with probability `p` and scale the others to keep the expectation.

    On a CPU `p` is rounded to a multiple of 1/65536, with the scale of the rounded rate, so the result is unbiased.
    Draws come from torch's default generator. On other devices, and in a compiled graph, this is torch's dropout.
    """
    if not training or p == 0:
        return tensor
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return F.dropout(tensor, p, training)
    return _ByteMaskDropout.apply(tensor, dropout_mask(tensor.shape, levels), kept_scale(levels))


def shared_dropout(tensor: Tensor, numbers: Tensor, count: int, p: float, training: bool, *, whole: bool) -> Tensor:
    """Dropout with one mask for all rows of a tensor that have the same number.

    With sequence numbers it is variational dropout (Gal & Ghahramani 2016): the same features of a sequence are dropped
    at every step. With word ids and `whole` it is embedding dropout (Merity et al. 2017, section 4.3): all occurrences
    of a word are dropped.

    Args:
        tensor: (..., rows, width).
        numbers: (..., rows) integers below `count`; missing leading dimensions are broadcast.
        count: Number of masks.
        p, training: As in `dropout`.
        whole: Drop rows, not single features.
    """
    if not training or p == 0:
        return tensor
    shape = torch.Size((count, 1 if whole else tensor.shape[-1]))
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return tensor * F.dropout(tensor.new_ones(shape), p, training)[numbers]
    return _ByteMaskDropout.apply(tensor, dropout_mask(shape, levels)[numbers], kept_scale(levels))


def dropout_signs(shape: torch.Size, dropped_levels: int) -> Tensor:
    """Positive for kept elements, negative for dropped ones, with probability `dropped_levels` / 65536."""
    return _draws(shape) + (DROPOUT_LEVELS // 2 - dropped_levels + 0.5)


def dropout_mask(shape: torch.Size, dropped_levels: int) -> Tensor:
    """1 for kept elements, 0 for dropped ones, with probability `dropped_levels` / 65536; bytes, since torch multiplies
    by booleans far more slowly."""
    return (_draws(shape) >= dropped_levels - DROPOUT_LEVELS // 2).view(torch.int8)


def kept_scale(dropped_levels: int) -> float:
    """The factor of kept elements that keeps the expectation."""
    return DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped_levels)


def _draws(shape: torch.Size) -> Tensor:
    """Uniform int16 numbers."""
    elements = shape.numel()
    draws = torch.empty((elements + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return draws.view(torch.int16)[:elements].view(shape)


class _ByteMaskDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return (tensor * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None
