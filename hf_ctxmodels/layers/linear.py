"""Linear maps at full speed on a CPU: by oneDNN where `layers.cpu.onednn` applies."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from hf_ctxmodels.layers.cpu import onednn
from hf_ctxmodels.layers.cpu.onednn import are_plain_tensors, can_use_onednn
from hf_ctxmodels.layers.cpu.prepacking import active_prepacked_weights

_LEAST_WORK = 1 << 21  # multiplications; with fewer, the overhead exceeds the gain


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by oneDNN on a CPU in single precision.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,) or None.

    Returns:
        (..., out).
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or input.numel() * weight.shape[0] < _LEAST_WORK or not can_use_onednn(input, weight):
        return F.linear(input, weight, bias)
    apply = _Product.apply if _differentiable(input, weight, bias) else _multiply
    return apply(input.reshape(-1, input.shape[-1]), weight, bias).view(*input.shape[:-1], -1)


def apply_linear(module: nn.Module, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
    """What a linear map makes of its input, by `linear`.

    The fast product is a choice of this call, not of the module: the weights live in plain `torch.nn.Linear` modules,
    where quantization, adapters and sharding look for them. What stands in the place of such a module (see
    `is_plain_linear`) is called.

    Args:
        module: The linear map, or its replacement.
        input: (..., in).
        start, stop: A range of the output features; a plain map, and one that says `accepts_output_range`, computes only these.

    Returns:
        (..., out), or (..., stop - start).
    """
    if not is_plain_linear(module):
        if start is not None and getattr(module, "accepts_output_range", False):
            return module(input, start, stop)
        output = module(input)
        return output if start is None else output[..., start:stop]
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    prepacked = _prepacked(weight, input, start, stop)
    if start is not None:
        weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
    if prepacked is None or _differentiable(input, bias):
        return linear(input, weight, bias)
    return onednn.multiply(input.reshape(-1, input.shape[-1]), prepacked, bias).view(*input.shape[:-1], -1)


class LinearLayers(nn.Sequential):
    """`torch.nn.Sequential` whose linear maps are applied by `apply_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        for layer in self:
            input = apply_linear(layer, input)
        return input


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a call only multiplies by an ordinary weight.

    False for an adapter, a quantized or parametrised map, a subclass, and a map with hooks, a replaced `forward` or a
    tensor subclass for its weight: code that reads `.weight` would pass over what these do.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    return are_plain_tensors(*module._parameters.values())  # faster than by name: generation calls this at every step


def is_rowwise(module: nn.Module) -> bool:
    """Whether a row of the output depends on the same row of the input alone: a plain map, or a replacement without
    hooks that says so by `is_rowwise`."""
    if is_plain_linear(module):
        return True
    hooked = module._forward_pre_hooks or module._forward_hooks or _has_any_global_hook()
    return not hooked and getattr(module, "is_rowwise", False)


def product(left: Tensor, right: Tensor) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), without autograd."""
    if not can_use_onednn(left, right):
        return left @ right.T
    if not left.is_contiguous() and right.numel() < left.numel():  # oneDNN would copy the left operand
        return _multiply(right, left).T
    return _multiply(left, right)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (right.is_contiguous() or right.T.is_contiguous()):  # for example a slice of columns: slow in oneDNN
        right = right.contiguous()
    return onednn.multiply(left, right, bias)


def _prepacked(weight: Tensor, input: Tensor, start: int | None, stop: int | None) -> Tensor | None:
    """The weight of a plain map, or a range of its rows, in oneDNN's order; None where there is no such copy."""
    if (
        torch.compiler.is_compiling()
        or (weights := active_prepacked_weights()) is None
        or _differentiable(input, weight)
    ):
        return None
    if not onednn.multiplies(input, weight):
        return None
    return weights.of(weight, start, stop, input.numel() // input.shape[-1])


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
