"""Fast linear layers on a CPU: `linear(module, input)`, the oneDNN products that it calls, and prepacked weights.

`torch.nn.functional.linear` multiplies float32 matrices with MKL on a CPU, which uses only half the width of the vector
units of non-Intel processors. torch also ships oneDNN, for half precision and compiled graphs; here it serves eager
float32 as well. On other devices, and wherever oneDNN does not apply, all functions compute the same with torch's own
operators.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_ctxmodels.core.compiled_ops import define_operator, is_compiled

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
HAS_BFLOAT16_PRODUCT = HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
MAX_PREPACKED_BYTES = 1 << 30
CHUNK_ROWS = 1024  # rows of a chunk in `apply_in_chunks`

_MIN_MULTIPLICATIONS = 1 << 21  # with fewer, the overhead of oneDNN exceeds the gain
_PREPACKED_ROWS = 32  # the number of rows that oneDNN optimizes for; for one row it would keep the ordinary layout
_MAX_PREPACKED_ROWS = 64  # with more rows, a prepacked weight gains less than a tenth
_PREPACK_AFTER = 6  # products before a weight is prepacked, which takes as long as so many products with 8 rows


def linear(module: nn.Module, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
    """Call a linear layer, (..., in) -> (..., out), with the fastest product on a CPU.

    The weights live in plain `torch.nn.Linear` modules, where quantization, adapters and sharding find them. A module
    that replaces one (see `is_plain_linear`) is called. Of the output features [start, stop), a plain layer, and one
    with `accepts_output_range`, computes only this range.
    """
    if not is_plain_linear(module):
        if start is not None and getattr(module, "accepts_output_range", False):
            return module(input, start, stop)
        output = module(input)
        return output if start is None else output[..., start:stop]
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    prepacked = None if torch.compiler.is_compiling() else _prepacked_weight(module, input, start, stop)
    if start is not None:
        weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
    if prepacked is None or _requires_grad(input, bias):
        return fast_linear(input, weight, bias)
    return onednn_linear(input.reshape(-1, input.shape[-1]), prepacked, bias).view(*input.shape[:-1], -1)


class LinearLayers(nn.Sequential):
    """`torch.nn.Sequential` of layers that are called by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        for layer in self:
            input = linear(layer, input)
        return input


def fast_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, computed by oneDNN for float32 on a CPU."""
    if is_compiled() and _is_compiled_product(input, weight):
        return _CompiledProduct.apply(input.reshape(-1, input.shape[-1]), weight, bias).unflatten(0, input.shape[:-1])
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if is_traced or input.numel() * weight.shape[0] < _MIN_MULTIPLICATIONS or not can_use_onednn(input, weight):
        return F.linear(input, weight, bias)
    product = _LinearProduct.apply if _requires_grad(input, weight, bias) else _contiguous_linear
    return product(input.reshape(-1, input.shape[-1]), weight, bias).view(*input.shape[:-1], -1)


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), without autograd."""
    if not can_use_onednn(left, right):
        return left @ right.T
    if not left.is_contiguous() and right.numel() < left.numel():  # oneDNN would copy the left operand
        return _contiguous_linear(right, left).T
    return _contiguous_linear(left, right)


def apply_in_chunks(function: Callable[[Tensor], Tensor], input: Tensor, module: nn.Module) -> Tensor:
    """Compute `function(input)`, the forward pass of `module`, which computes each row independently, for 1,024 rows at
    a time on a CPU, which needs less memory.

    The input is processed as a whole in training, with gradients, in traced graphs, and if the children of `module`
    have hooks or replacements that need all rows.
    """
    if module.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return function(input)
    if input.numel() <= CHUNK_ROWS * input.shape[-1] or not can_use_onednn(input):
        return function(input)
    if not all(isinstance(child, nn.Dropout) or is_rowwise(child) for child in module.children()):
        return function(input)
    rows = input.reshape(-1, input.shape[-1])
    output = torch.empty_like(rows)
    for start in range(0, len(rows), CHUNK_ROWS):
        output[start : start + CHUNK_ROWS] = function(rows[start : start + CHUNK_ROWS])
    return output.view(input.shape)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a call only multiplies by an ordinary weight.

    False for an adapter, a quantized or parametrized layer, a subclass, and a layer with hooks, a replaced `forward` or
    a tensor subclass as its weight: code that reads `.weight` would skip what these do.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    return are_plain_tensors(*module._parameters.values())  # faster than by name: generation calls this at every step


def is_rowwise(module: nn.Module) -> bool:
    """Whether each row of the output depends only on the same row of the input, and no hook reads the whole tensors.

    True for plain linear layers, activations without parameters, and modules with the attribute `is_rowwise`.
    """
    if is_plain_linear(module):
        return True
    if module._forward_pre_hooks or module._forward_hooks or _has_any_global_hook():
        return False
    has_no_state = not (module._parameters or module._buffers or module._modules)
    return getattr(module, "is_rowwise", has_no_state)


def can_use_onednn(*tensors: Tensor, bfloat16: bool = False) -> bool:
    """Whether oneDNN applies: ordinary tensors on a CPU, unless `operators_are_intercepted`, in float32 without
    autocast, or with `bfloat16` in bfloat16, also under autocast."""
    dtype, is_autocast = tensors[0].dtype, torch.is_autocast_enabled("cpu")
    if dtype is torch.float32:
        is_supported = HAS_ONEDNN and not is_autocast
    else:
        is_supported = bfloat16 and HAS_BFLOAT16_PRODUCT and dtype is torch.bfloat16
        is_supported = is_supported and not (is_autocast and torch.get_autocast_dtype("cpu") is not dtype)
    if not is_supported or operators_are_intercepted() or not are_plain_tensors(*tensors):
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype is dtype and tensor.numel() > 0 for tensor in tensors)


def operators_are_intercepted() -> bool:
    """Whether operators are recorded or transformed: compilation, tracing, `torch.func`, a dispatch mode, or
    forward-mode derivatives (which the oneDNN operators do not define)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether no tensor is of a subclass, for example quantized or sharded."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
            return False
    return True


def onednn_linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), ordinary or prepacked, plus (columns,), by oneDNN, without
    autograd."""
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


def prepack_weight(weight: Tensor) -> Tensor:
    """A copy of (columns, inner) in the memory layout that oneDNN reads fastest; only valid as the weight of
    `onednn_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PREPACKED_ROWS)


def _prepacked_weight(layer: nn.Linear, input: Tensor, start: int | None, stop: int | None) -> Tensor | None:
    """A copy of the weight for this product: of the layer (`prepack_linear_layers`) or of the context."""
    layer_copy, context = layer.__dict__.get("prepacked_weight"), active_prepacked_weights()
    if start is not None:
        layer_copy = None
    if (layer_copy is None and context is None) or _requires_grad(input, layer.weight):
        return None
    if not can_use_onednn(input, layer.weight, bfloat16=True):
        return None
    prepacked = None if layer_copy is None else layer_copy.get(layer)
    if prepacked is None and context is not None:
        prepacked = context.get(layer.weight, start, stop, input.numel() // input.shape[-1])
    return prepacked


def _contiguous_linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (right.is_contiguous() or right.T.is_contiguous()):  # for example a slice of columns: slow in oneDNN
        right = right.contiguous()
    return onednn_linear(left, right, bias)


def _requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _LinearProduct(torch.autograd.Function):
    """left @ right.T + bias, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right)
        return _contiguous_linear(left, right, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        needs_left, needs_right, needs_bias = ctx.needs_input_grad

        def multiply(first: Tensor, second: Tensor) -> Tensor:
            if _requires_grad(first, second):
                return _LinearProduct.apply(first, second, None)
            return matmul_transposed(first, second)

        return (
            multiply(grad, right.T) if needs_left else None,
            multiply(grad.T, left.T) if needs_right else None,
            grad.sum(0) if needs_bias else None,
        )


def _is_compiled_product(input: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product replaces torch's in a compiled graph, whose number of rows is unknown."""
    is_float32 = input.dtype is torch.float32 and weight.dtype is torch.float32
    return HAS_ONEDNN and is_float32 and input.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _run_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return fast_linear(left, right, bias).contiguous()


_product = define_operator(
    "linear(Tensor left, Tensor right, Tensor? bias) -> Tensor",
    _run_product,
    lambda left, right, bias: left.new_empty(left.shape[0], right.shape[0]),
)


class _CompiledProduct(torch.autograd.Function):
    """`_LinearProduct` in a compiled graph."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.has_bias = bias is not None
        return _product(left, right, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        if right.shape[1] < right.shape[0]:  # oneDNN copies the left operand, which is transposed
            grad_right = _product(left.T, grad.T, None).T
        else:
            grad_right = _product(grad.T, left.T, None)
        return _product(grad, right.T, None), grad_right, grad.sum(0) if ctx.has_bias else None


# A product of few rows takes as long as reading its weights, and oneDNN reads them up to twice as fast in a blocked
# layout ("prepacked"). A copy costs as much as some products gain, so a weight is copied after several uses.


class PrepackedWeight:
    """The prepacked copy of the weight of a linear layer, which `linear` uses until the weight changes."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._storage = weight.detach()  # keeps the address from being used again
        self._state = _weight_state(weight)
        self._copy = prepack_weight(weight)

    def __reduce__(self) -> Any:
        return type(None), ()  # the copy of a layer has no prepacked weight

    def get(self, layer: nn.Linear) -> Tensor | None:
        """The copy; None if the weight of the layer has changed, except by `.data`, which frees the copy."""
        weight = layer._parameters.get("weight")  # missing after pruning, which replaces it by `weight_orig`
        if weight is self._weight and _weight_state(weight) == self._state:
            return self._copy
        del layer.prepacked_weight
        return None


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of an optimizer as a change of its weights; torch does not count the step of a fused optimizer."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    increment_version(weights)


@cache
def _count_all_steps() -> None:
    """Register `_count_step` for all optimizers of this process."""
    register_optimizer_step_post_hook(_count_step)


def prepack_linear_layers(module: nn.Module) -> None:
    """Prepack the weights of all plain linear layers of a module, for any number of rows."""
    _count_all_steps()
    for layer in module.modules():
        if not is_plain_linear(layer) or layer.weight.is_inference():  # without a version
            continue
        if layer.weight.numel() * _PREPACKED_ROWS >= _MIN_MULTIPLICATIONS and can_use_onednn(
            layer.weight, bfloat16=True
        ):
            layer.prepacked_weight = PrepackedWeight(layer.weight)  # type: ignore[assignment]


def _weight_state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


@dataclass(eq=False)
class _WeightUse:
    """Use of a weight, or of a range of its rows."""

    weight: Tensor  # referenced because its `id` is the key
    state: tuple[int, int]  # its data pointer and version at the first use
    count: int = 0  # number of products
    prepacked: Tensor | None = None  # None until enough products have been computed


class PrepackedWeights:
    """Prepacked copies of weights, each made once enough products with the weight have been computed."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._uses: dict[tuple[int, int | None, int | None], _WeightUse] = {}

    def get(self, weight: Tensor, start: int | None, stop: int | None, rows: int) -> Tensor | None:
        """The copy for a product with `rows` rows of another operand; None if there is none (yet).

        A parameter (out, in) that changes, except by `.data`, is copied again. `start` and `stop` are the range of
        `out`.
        """
        if rows > _MAX_PREPACKED_ROWS or weight.is_inference():  # inference tensors have no version
            return None
        state = _weight_state(weight)
        use = self._uses.get((id(weight), start, stop))
        if use is None or use.state != state:
            if use is not None and use.prepacked is not None:
                self._free_bytes += use.prepacked.nbytes
            use = self._uses[id(weight), start, stop] = _WeightUse(weight, state)
        if use.prepacked is None:
            use.count += 1
            if use.count > _PREPACK_AFTER and (selected := weight[start:stop]).nbytes <= self._free_bytes:
                use.prepacked = prepack_weight(selected)
                self._free_bytes -= use.prepacked.nbytes
        return use.prepacked


_active: ContextVar[PrepackedWeights | None] = ContextVar("prepacked_weights", default=None)


def active_prepacked_weights() -> PrepackedWeights | None:
    """The copies of the current `prepacked_weights` context; None outside of it."""
    return _active.get()


@contextmanager
def prepacked_weights(max_bytes: int = MAX_PREPACKED_BYTES) -> Iterator[None]:
    """Prepack the weights of plain linear layers that are applied repeatedly to few rows without gradients.

    The copies are freed at the end. `generate` opens this context; around several calls it keeps the copies between
    them. A weight that changes is copied again, except after a change by `.data`, which torch does not track.

    Args:
        max_bytes: Limit of all copies together; within another such context its limit applies. 0 disables copies.
    """
    if max_bytes and active_prepacked_weights() is not None:
        yield
        return
    token = _active.set(PrepackedWeights(max_bytes) if max_bytes else None)
    hook = register_optimizer_step_post_hook(_count_step)
    try:
        yield
    finally:
        hook.remove()
        _active.reset(token)
