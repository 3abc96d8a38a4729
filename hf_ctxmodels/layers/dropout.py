"""Dropout (Srivastava et al. 2014) that is cheap on a CPU too.

torch draws one number after the other there, on one thread, and keeps the mask as floating-point numbers: a good tenth
of a training step and of its memory. Here one 64-bit draw decides four elements, and the mask is kept in bytes.
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
    """Zero elements with probability `p` and scale the others so that the expectation stays.

    On a CPU `p` is rounded to a multiple of 1/65536, and the scale belongs to the rounded rate: still unbiased. Draws
    come from torch's default generator. Elsewhere, and in a compiled graph, this is torch's own dropout.
    """
    if not training or p == 0:
        return tensor
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return F.dropout(tensor, p, training)
    return _ByteMaskDropout.apply(tensor, byte_mask(tensor.shape, levels), kept_scale(levels))


def shared_dropout(tensor: Tensor, numbers: Tensor, count: int, p: float, training: bool, *, whole: bool) -> Tensor:
    """Dropout of one draw for all rows of a tensor that have the same number.

    Numbers of sequences make it variational dropout (Gal & Ghahramani 2016): a sequence loses the same features at
    every step. Ids of words, with `whole`, make it embedding dropout (Merity et al. 2017, section 4.3): a word that is
    dropped is missing wherever it stands.

    Args:
        tensor: (..., rows, width).
        numbers: (..., rows) integers below `count`; fewer dimensions are those of all.
        count: How many there are to draw for.
        p, training: As in `dropout`.
        whole: Drop rows, not single features.
    """
    if not training or p == 0:
        return tensor
    shape = torch.Size((count, 1 if whole else tensor.shape[-1]))
    levels = round(p * DROPOUT_LEVELS)
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or levels in (0, DROPOUT_LEVELS):
        return tensor * F.dropout(tensor.new_ones(shape), p, training)[numbers]
    return _ByteMaskDropout.apply(tensor, byte_mask(shape, levels)[numbers], kept_scale(levels))


def signs(shape: torch.Size, dropped_levels: int) -> Tensor:
    """Positive where an element is kept, negative where it is dropped: with probability `dropped_levels` / 65536."""
    return _draws(shape) + (DROPOUT_LEVELS // 2 - dropped_levels + 0.5)


def byte_mask(shape: torch.Size, dropped_levels: int) -> Tensor:
    """1 where an element is kept, 0 where it is dropped, which happens with probability `dropped_levels` / 65536.

    Bytes, since torch multiplies by booleans far more slowly.
    """
    return (_draws(shape) >= dropped_levels - DROPOUT_LEVELS // 2).view(torch.int8)


def kept_scale(dropped_levels: int) -> float:
    """What kept elements are multiplied by, so that the expectation stays."""
    return DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped_levels)


def _draws(shape: torch.Size) -> Tensor:
    """int16, uniform over all its values."""
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
