"""Codes of 8 bits: weights by rows, activations by tokens or by tensors.

A weight is `code * scale` with codes from -127 to 127 and a scale for each output row. An activation is
`(code - zero_point) * scale` with codes from 0 to 255 (Jacob et al. 2018, arXiv 1712.05877, equation 1).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError

LARGEST = 127  # of a weight's code, and of the distance of a token's code from `MIDDLE`
MIDDLE = 128  # the zero point of codes by tokens
_CHUNK = 1 << 17  # elements that are rounded at a time: intermediate results then stay in the cache
_BETWEEN = torch.int16  # torch converts single precision to it, and it to uint8, with vector instructions
_ROUNDED = 0.5  # added before what is behind the point is cut off
_TINY = 1e-30  # largest value of a row below which all its codes are `MIDDLE`


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a weight and the scales of its rows.

    Args:
        weight: (..., rows, columns), finite.

    Returns:
        (..., rows, columns) int8 codes and (..., rows) float32 scales; a row of zeros has the scale 1.
    """
    weight = weight.detach().float()
    largest = weight.abs().amax(-1)
    scale = (largest / LARGEST).where(largest > 0, 1.0)
    return (weight / scale[..., None]).round_().to(torch.int8), scale


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., rows, columns) weights of codes and of the scales of their rows."""
    return (codes * scale.float()[..., None]).to(dtype)


def check_not_trained(module: nn.Module) -> None:
    """Raise CtxError for a module with codes in training mode, where gradients are recorded: they would end here, and a
    training run would learn nothing of the encoder, or fail in its first backward pass."""
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise CtxError(
            "A quantized model cannot be trained: its weights are codes.",
            location=type(module).__name__,
            hint="train the model in single precision and quantize it afterwards; for inference call model.eval().",
        )


class Activations(NamedTuple):
    """Codes of activations.

    Attributes:
        codes: (rows, width) uint8.
        zero_point: The code of 0.
        scale: (rows, 1) of every row, or a number for all.
    """

    codes: Tensor
    zero_point: int
    scale: Tensor | float

    def dequantize(self) -> Tensor:
        """(rows, width) float32."""
        return (self.codes.float() - self.zero_point) * self.scale


def quantize_tokens(states: Tensor) -> Activations:
    """Codes with a scale for each row, so that a row's result depends on no other row.

    Args:
        states: (rows, width) float32. A row that is not finite has a scale that is not finite.
    """
    middle, scales = states.new_full((states.shape[1],), MIDDLE + _ROUNDED), []

    def scaled(rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True)
        scales.append(largest * (1 / LARGEST))
        return torch.addcmul(middle, rows, largest.clamp_min_(_TINY).reciprocal_().mul_(LARGEST))

    codes = _rounded(states, scaled)
    return Activations(codes, MIDDLE, torch.cat(scales))


def range_of(states: Tensor) -> tuple[float, float]:
    """The least and the largest value, and 0 where that lies outside."""
    if not states.numel():
        return 0.0, 0.0
    least, largest = (float(each) for each in states.aminmax())
    return min(least, 0.0), max(largest, 0.0)


def scale_of_range(least: float, largest: float) -> tuple[float, int]:
    """Scale and zero point of codes from 0 to 255 for values of a range that has 0 in it."""
    scale = (largest - least) / 255 or 1.0
    return scale, round(-least / scale) if math.isfinite(scale) else 0


def quantize_tensor(states: Tensor, scale: float, zero_point: int) -> Activations:
    """Codes with one scale; values outside of its range become its ends.

    Args:
        states: (rows, width) float32.
        scale, zero_point: Of `scale_of_range`.
    """
    middle = states.new_full((), zero_point + _ROUNDED)
    codes = _rounded(states, lambda rows: torch.add(middle, rows, alpha=1 / scale).clamp_(0, 255))
    return Activations(codes, zero_point, scale)


def _rounded(states: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    """uint8 codes of what `scaled` makes of each part of the rows, which then stays in the cache."""
    parts = _parts(states)
    if len(parts) == 1:
        return scaled(states).to(_BETWEEN).to(torch.uint8)
    codes = torch.empty(states.shape, dtype=torch.uint8, device=states.device)
    for part in parts:
        codes[part] = scaled(states[part]).to(_BETWEEN)
    return codes


def _parts(states: Tensor) -> list[slice]:
    rows, width = states.shape
    if torch.compiler.is_compiling():  # the number of parts would depend on the data
        return [slice(None)]
    step = max(1, _CHUNK // max(1, width))
    return [slice(first, first + step) for first in range(0, max(1, rows), step)]
