"""Linear maps at full speed on a CPU.

`torch.nn.functional.linear` uses MKL for single-precision products on a CPU, which uses half the width of the vector
units of processors that are not Intel's. torch also ships oneDNN, for half precision and compiled graphs; here it
multiplies in single precision too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LEAST_WORK = 1 << 21  # multiplications; with fewer, the overhead exceeds the gain
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by oneDNN on a CPU in single precision.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,) or None.

    Returns:
        (..., out).
    """
    if input.numel() * weight.shape[0] < _LEAST_WORK or not multiplies_fast(input, weight):
        return F.linear(input, weight, bias)
    multiply = _Product.apply if _differentiable(input, weight, bias) else _multiply
    return multiply(input.reshape(-1, input.shape[-1]), weight, bias).view(*input.shape[:-1], -1)


def partial_linear(module: nn.Module, input: Tensor, start: int, stop: int) -> Tensor:
    """A range of the output features of a linear map.

    A plain `Linear` computes only these. Other modules (an adapter, a quantized or parametrised map, one with hooks or
    a replaced `forward`) are called, and their output is sliced.

    Args:
        module: The linear map, or its replacement.
        input: (..., in).
        start, stop: The range.

    Returns:
        (..., stop - start).
    """
    if type(module) is not Linear or not _is_plain(module):
        return module(input)[..., start:stop]
    bias = None if module.bias is None else module.bias[start:stop]
    return linear(input, module.weight[start:stop], bias)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _is_plain(module: Linear) -> bool:
    """Whether a call only multiplies by an ordinary weight."""
    if "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS):
        return False
    return type(module.weight) in (nn.Parameter, Tensor)


def product(left: Tensor, right: Tensor) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), without autograd."""
    if not multiplies_fast(left, right):
        return left @ right.T
    if not left.is_contiguous() and right.numel() < left.numel():  # oneDNN would copy the left operand
        return _multiply(right, left).T
    return _multiply(left, right)


def multiplies_fast(*tensors: Tensor) -> bool:
    """Whether oneDNN applies: on a CPU, in single precision, outside of compilation and autocast."""
    if not _HAS_ONEDNN or torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    return all(each.device.type == "cpu" and each.dtype is torch.float32 and each.numel() > 0 for each in tensors)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (right.is_contiguous() or right.T.is_contiguous()):  # for example a slice of columns: slow in oneDNN
        right = right.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def _differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


class _Product(torch.autograd.Function):
    """left @ right.T + bias, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right)
        return _multiply(left, right, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        wants_left, wants_right, wants_bias = ctx.needs_input_grad

        def multiply(first: Tensor, second: Tensor) -> Tensor:
            return _Product.apply(first, second, None) if _differentiable(first, second) else product(first, second)

        return (
            multiply(grad, right.T) if wants_left else None,
            multiply(grad.T, left.T) if wants_right else None,
            grad.sum(0) if wants_bias else None,
        )
