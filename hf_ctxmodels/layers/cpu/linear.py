"""Linear layers at full speed on a CPU: products by oneDNN, prepacked weights, and `linear`, which calls a module."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
HAS_BFLOAT16_PRODUCT = HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
_ROWS = 32  # for one row oneDNN would keep the common order


def can_use_onednn(*tensors: Tensor) -> bool:
    """Whether oneDNN applies: ordinary tensors on a CPU, in single precision, outside of autocast and of whatever
    records or transforms operators (compilation, export, `torch.func`, dispatch modes)."""
    return HAS_ONEDNN and not torch.is_autocast_enabled("cpu") and _are_multiplied(tensors, torch.float32)


def can_use_onednn_or_bfloat16(*tensors: Tensor) -> bool:
    """Whether oneDNN applies as in `can_use_onednn`, or in bfloat16, which autocast to bfloat16 leaves as it is."""
    if can_use_onednn(*tensors):
        return True
    if not HAS_BFLOAT16_PRODUCT or not _are_multiplied(tensors, torch.bfloat16):
        return False
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is torch.bfloat16


def _are_multiplied(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    if operators_are_intercepted() or not are_plain_tensors(*tensors):
        return False
    return all(each.device.type == "cpu" and each.dtype is dtype and each.numel() > 0 for each in tensors)


def operators_are_intercepted() -> bool:
    """Whether something records or transforms operators: compilation, tracing, `torch.func`, a dispatch mode, forward
    derivatives (which operators without them would leave out)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether none is of a subclass, for example quantized or sharded."""
    for each in tensors:
        if each is not None and type(each) is not nn.Parameter and type(each) is not Tensor:
            return False
    return True


def onednn_linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), plus (columns,); without autograd.

    Args:
        left: The rows.
        right: The weight, ordinary or prepacked.
        bias: None for none.
    """
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prepack_weight(weight: Tensor) -> Tensor:
    """A copy of (columns, inner) in the order that `onednn_linear` reads fastest; it is good for nothing else."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)


MAX_PREPACKED_BYTES = 1 << 30
_MOST_ROWS = 64  # with more, less than a tenth is gained
_PAYS_AFTER = 6  # products: what a copy costs, with 8 rows


@dataclass(eq=False)
class _Use:
    """Of a weight, or of a range of its rows.

    Attributes:
        weight: It is held, since its `id` is its key.
        state: Where it lay and how often it had been changed in place.
        count: Products so far.
        prepacked: The copy, once it pays.
    """

    weight: Tensor
    state: tuple[int, int]
    count: int = 0
    prepacked: Tensor | None = None


class PrepackedWeights:
    """Copies of weights, each made when as many products have been made without it as pay for it.

    Args:
        max_bytes: Of all copies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._uses: dict[tuple[int, int | None, int | None], _Use] = {}

    def of(self, weight: Tensor, start: int | None, stop: int | None, rows: int) -> Tensor | None:
        """The copy for a product; None where there is none (yet).

        Args:
            weight: (out, in), a parameter. One that is changed is copied anew, if not by way of `.data`.
            start, stop: The range of `out` that is computed; None for all.
            rows: Of the other operand.
        """
        if rows > _MOST_ROWS or weight.is_inference():  # the latter do not tell that they were changed
            return None
        state = (weight.data_ptr(), weight._version)
        use = self._uses.get((id(weight), start, stop))
        if use is None or use.state != state:
            if use is not None and use.prepacked is not None:
                self._free += use.prepacked.nbytes
            use = self._uses[id(weight), start, stop] = _Use(weight, state)
        if use.prepacked is None:
            use.count += 1
            if use.count > _PAYS_AFTER and (used := weight[start:stop]).nbytes <= self._free:
                use.prepacked = prepack_weight(used)
                self._free -= use.prepacked.nbytes
        return use.prepacked


_active: ContextVar[PrepackedWeights | None] = ContextVar("prepacked_weights", default=None)


def active_prepacked_weights() -> PrepackedWeights | None:
    """Those of `prepacked_weights`; None outside of it."""
    return _active.get()


@contextmanager
def prepacked_weights(max_bytes: int = MAX_PREPACKED_BYTES) -> Iterator[None]:
    """Within, plain linear maps that are applied again and again to few rows without gradients copy their weights.

    The copies are freed at the end. `generate` does this by itself; around several calls it keeps the copies from one
    to the next. A weight that is changed in between is copied anew, unless it is changed by way of `.data`
    (`weight.data.add_(1)`), of which torch keeps no account: end the block before.

    Args:
        max_bytes: Of all copies together, unless in another such block, whose number holds. 0 copies nothing anywhere.
    """
    if max_bytes and active_prepacked_weights() is not None:
        yield
        return
    token = _active.set(PrepackedWeights(max_bytes) if max_bytes else None)
    try:
        yield
    finally:
        _active.reset(token)


_LEAST_WORK = 1 << 21  # multiplications; with fewer, the overhead exceeds the gain


def fast_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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


def linear(module: nn.Module, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
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
        return fast_linear(input, weight, bias)
    return onednn_linear(input.reshape(-1, input.shape[-1]), prepacked, bias).view(*input.shape[:-1], -1)


class LinearLayers(nn.Sequential):
    """`torch.nn.Sequential` whose linear maps are applied by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        for layer in self:
            input = linear(layer, input)
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
    return onednn_linear(left, right, bias)


def _prepacked(weight: Tensor, input: Tensor, start: int | None, stop: int | None) -> Tensor | None:
    """The weight of a plain map, or a range of its rows, in oneDNN's order; None where there is no such copy."""
    if (
        torch.compiler.is_compiling()
        or (weights := active_prepacked_weights()) is None
        or _differentiable(input, weight)
    ):
        return None
    if not can_use_onednn_or_bfloat16(input, weight):
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
