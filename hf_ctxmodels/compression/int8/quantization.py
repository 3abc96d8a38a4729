"""int8 quantization: weights per row, activations per token or per tensor.

A weight is `code * scale` with codes from -127 to 127 and one scale for each output row. An activation is
`(code - zero_point) * scale` with codes from 0 to 255 (Jacob et al. 2018, arXiv 1712.05877, equation 1).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError

MAX_CODE = 127  # of weights; activations of a token are at most this far from `MIDDLE`
MIDDLE = 128  # zero point of activations quantized per token
_CHUNK = 1 << 17  # elements rounded at a time, so that intermediate results stay in the cache
_INTERMEDIATE = torch.int16  # torch converts float32 to it, and it to uint8, with vector instructions
_ROUNDING = 0.5  # added before truncation
_TINY = 1e-30  # rows with a smaller maximum have codes `MIDDLE` only


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a finite (..., rows, columns) weight to int8 codes and (..., rows) float32 scales, 1 for zeros."""
    weight = weight.detach().float()
    maximum = weight.abs().amax(-1)
    scale = (maximum / MAX_CODE).where(maximum > 0, 1.0)
    return (weight / scale[..., None]).round_().to(torch.int8), scale


def fixed(values: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(values, requires_grad=False)


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., rows, columns) weights from codes and the scales of their rows."""
    return (codes * scale.float()[..., None]).to(dtype)


def check_not_trained(module: nn.Module) -> None:
    """Raise CtxError for a quantized module in training mode with gradients: its layers would not be trained."""
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise CtxError(
            "A quantized model cannot be trained: its weights are integer codes.",
            location=type(module).__name__,
            hint="train the float32 model and quantize it afterwards; call model.eval() for inference.",
        )


class Activations(NamedTuple):
    """(rows, width) uint8 codes, the code of the value 0, and (rows, 1) scales or one scale."""

    codes: Tensor
    zero_point: int
    scale: Tensor | float

    def dequantize(self) -> Tensor:
        """(rows, width) float32."""
        return (self.codes.float() - self.zero_point) * self.scale


def quantize_tokens(states: Tensor) -> Activations:
    """Quantize (rows, width) float32 activations with one scale per row, which is not finite for a non-finite row."""
    middle, scales = states.new_full((states.shape[1],), MIDDLE + _ROUNDING), []

    def scale_rows(rows: Tensor) -> Tensor:
        maximum = rows.abs().amax(1, keepdim=True)
        scales.append(maximum * (1 / MAX_CODE))
        return torch.addcmul(middle, rows, maximum.clamp_min_(_TINY).reciprocal_().mul_(MAX_CODE))

    codes = _round_to_uint8(states, scale_rows)
    return Activations(codes, MIDDLE, torch.cat(scales))


def range_of(states: Tensor) -> tuple[float, float]:
    """Minimum and maximum, extended to include 0."""
    if not states.numel():
        return 0.0, 0.0
    minimum, maximum = (float(value) for value in states.aminmax())
    return min(minimum, 0.0), max(maximum, 0.0)


def scale_of_range(minimum: float, maximum: float) -> tuple[float, int]:
    """Scale and zero point of codes from 0 to 255 for a range that includes 0."""
    scale = (maximum - minimum) / 255 or 1.0
    return scale, round(-minimum / scale) if math.isfinite(scale) else 0


def quantize_tensor(states: Tensor, scale: float, zero_point: int) -> Activations:
    """Quantize (rows, width) float32 activations with one scale; values outside the range are clamped."""
    middle = states.new_full((), zero_point + _ROUNDING)
    codes = _round_to_uint8(states, lambda rows: torch.add(middle, rows, alpha=1 / scale).clamp_(0, 255))
    return Activations(codes, zero_point, scale)


def _round_to_uint8(states: Tensor, scale_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """uint8 codes of scaled rows, computed in chunks that fit into the cache."""
    rows, width = states.shape
    step = max(1, _CHUNK // max(1, width))
    if torch.compiler.is_compiling() or rows <= step:  # while compiling, the number of chunks would depend on the data
        return scale_rows(states).to(_INTERMEDIATE).to(torch.uint8)
    codes = torch.empty(states.shape, dtype=torch.uint8, device=states.device)
    for start in range(0, rows, step):
        codes[start : start + step] = scale_rows(states[start : start + step]).to(_INTERMEDIATE)
    return codes
