"""A CUDA device that is simulated on the CPU: `cuda:0` tensors with real values, computed by the CPU kernels.

It counts what a GPU would do: kernel launches, views, reads by the host (which wait until the device has finished), and
blocking copies to the device; and it raises where CUDA raises for tensors on different devices. Attention follows the
selection rules of torch's `sdp_utils.cpp` for the compute capability. Kernels themselves do not run, and attention
applies no dropout.

Importing this module changes torch for the whole process, and must come before the import of torch, so it runs in a
separate process, with this folder and its parent in PYTHONPATH (see `head_records.py`).
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import device_guard  # noqa: F401  (before torch)
import torch
import torch._dynamo  # before torch.cuda is patched, since its import depends on the build
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
HALF_TYPES = (torch.float16, torch.bfloat16)

_VIEWS = {"_unsafe_view", "detach", "detach_", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided"}
_VIEWS |= {"new_empty_strided", "set_", "resize_", "_reshape_alias", "is_same_size"}
_READS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "equal"}
_READS |= {"bincount", "_unique", "multinomial", "_local_scalar_dense", "is_nonzero", "histc"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}

cpu_attention = F.scaled_dot_product_attention
capability = (9, 0)
has_float64 = True
_record: "Record | None" = None


@dataclass
class Record:
    """Operations on the device.

    Attributes:
        reads: (operator, line of the package) of all reads by the host.
        uploads: The same for copies to the device that block the host.
        launches: Kernel -> number.
        views: Number of operations without a kernel.
        attention: Kernel of attention calls -> number.
    """

    reads: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[tuple[str, str]] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    views: int = 0
    attention: Counter[str] = field(default_factory=Counter)

    @property
    def waits(self) -> list[str]:
        """Operations that make the host wait for the device, with the line of the package."""
        return [f"{operator} at {line}" for operator, line in self.reads + self.uploads]


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the operations."""
    global _record
    previous, _record = _record, Record()
    try:
        yield _record
    finally:
        _record = previous


def _read(operator: str) -> None:
    if _record is not None:
        _record.reads.append((operator, _calling_line()))


def _calling_line() -> str:
    """The innermost line of the package, or else of a library, on the stack."""
    frame, library_line = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/hf_ctxmodels/" in name and not name.endswith("/host_copies.py"):
            return f"{name.rpartition('/hf_ctxmodels/')[2]}:{frame.f_lineno}"
        if not library_line and any(f"/{package}/" in name for package in ("transformers", "accelerate", "optim")):
            library_line = f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return library_line


class DeviceTensor(Tensor):
    """A tensor on `cuda:0`; `values` has its values on the CPU."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        options = {"dtype": values.dtype, "device": DEVICE, "requires_grad": False}
        tensor = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), **options
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.values!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch.no_grad():
            copy: Any = DeviceTensor(self.values.detach().clone())
        memo[id(self)] = nn.Parameter(copy, self.requires_grad) if getattr(self, "_is_param", False) else copy
        return memo[id(self)]

    def tolist(self) -> Any:
        _read("tolist")
        return self.values.detach().tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy


class _Creation(TorchDispatchMode):
    """Dispatches the creation of tensors on the device, whose operators have no arguments on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator with the CPU kernel, and record it."""
    name = func._schema.name.partition("::")[2]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if name == "_pin_memory":
        return args[0]
    if not on_device and (target is None or target.type != "cuda"):
        return func(*args, **kwargs)
    if func.namespace == "prim" and name == "device":
        return DEVICE
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if on_device and on_cpu:
        _check_devices(func, name, args, on_cpu)
    _record_operator(func, name, args, kwargs, on_device, on_cpu, target)
    if name == "_local_scalar_dense":
        return args[0].values.item()
    cpu_args, cpu_kwargs = tree_map(_on_cpu, args), tree_map(_on_cpu, kwargs)
    if name == "_to_copy":
        cpu_kwargs.pop("non_blocking", None)
    elif name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_"):
        cpu_kwargs = {key: value for key, value in cpu_kwargs.items() if key not in ("grad_scale", "found_inf")}
    result = _CUDA_ONLY.get(name, func)(*cpu_args, **cpu_kwargs)
    if name == "_to_copy" and target is not None and target.type == "cpu":
        return result.clone() if result is args[0].values else result
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        return args[0]
    wrappers = {id(tensor.values): tensor for tensor in on_device}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DeviceTensor):
            return leaf
        if not has_float64 and leaf.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{func} in {leaf.dtype}, {_calling_line()}")
        return wrappers[id(leaf)] if id(leaf) in wrappers else DeviceTensor(leaf)

    return tree_map(wrap, result)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.values
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _check_devices(func: Any, name: str, args: Any, on_cpu: list[Tensor]) -> None:
    """Raise RuntimeError for a mix of devices that CUDA rejects; scalars and indices may be on the CPU."""
    if name in ("copy_", "_to_copy"):
        return
    mixed = [tensor for tensor in on_cpu if tensor.dim() > 0]
    if name in _INDEXING and isinstance(args[0], DeviceTensor):
        indices = [index for index in args[1] if index is not None and not isinstance(index, DeviceTensor)]
        if indices and _record is not None:
            _record.uploads.append((f"{name} by an index on the CPU", _calling_line()))
        mixed = [tensor for tensor in mixed if not any(tensor is index for index in indices)]
    if mixed:
        shapes = [tuple(tensor.shape) for tensor in mixed]
        raise RuntimeError(f"Expected all tensors on one device: {func} of cuda:0 and cpu {shapes}, {_calling_line()}")


def _record_operator(
    func: Any,
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
    on_device: list[DeviceTensor],
    on_cpu: list[Tensor],
    target: torch.device | None,
) -> None:
    if _record is None:
        return
    has_data_dependent_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _READS or _is_bool_index(name, args) or has_data_dependent_size:
        _read(f"{name}[bool]" if name in _INDEXING else name)
    elif name == "_to_copy" and on_device and target is not None and target.type == "cpu":
        _read("copy to the CPU")
    elif name == "_to_copy" and not on_device and on_cpu and on_cpu[0].numel() and not kwargs.get("non_blocking"):
        _record.uploads.append(("copy to the device", _calling_line()))
    elif name == "copy_" and isinstance(args[0], DeviceTensor) and not isinstance(args[1], DeviceTensor):
        if not (args[2] if len(args) > 2 else kwargs.get("non_blocking")) and args[1].dim():
            _record.uploads.append(("copy_ to the device", _calling_line()))
    elif name == "copy_" and not isinstance(args[0], DeviceTensor):
        _read("copy_ to the CPU")
    if name in _VIEWS or func.is_view:
        _record.views += 1
    else:
        _record.launches[name] += 1


def _is_bool_index(name: str, args: Any) -> bool:
    """Whether an operator selects by a mask, whose number of elements the host must know."""
    if name not in _INDEXING or not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return False
    is_fill = name not in ("index", "_unsafe_index") and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    return not is_fill


def _lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    gates = sum((bias for bias in biases if bias is not None), input_gates + hidden_gates)
    input_gate, forget_gate, update, output_gate = gates.chunk(4, 1)
    gates = torch.cat([input_gate.sigmoid(), forget_gate.sigmoid(), update.tanh(), output_gate.sigmoid()], 1)
    input_gate, forget_gate, update, output_gate = gates.chunk(4, 1)
    new_cell = forget_gate * cell + input_gate * update
    return output_gate * new_cell.tanh(), new_cell, gates


def _lstm_cell_backward(
    hidden_grad: Tensor | None, cell_grad: Tensor | None, cell: Tensor, new_cell: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    input_gate, forget_gate, update, output_gate = gates.chunk(4, 1)
    activated = new_cell.tanh()
    hidden_grad = torch.zeros_like(cell) if hidden_grad is None else hidden_grad
    cell_grad = hidden_grad * output_gate * (1 - activated**2) + (0 if cell_grad is None else cell_grad)
    gate_grads = (
        cell_grad * update * input_gate * (1 - input_gate),
        cell_grad * cell * forget_gate * (1 - forget_gate),
        cell_grad * input_gate * (1 - update**2),
        hidden_grad * activated * output_gate * (1 - output_gate),
    )
    grad = torch.cat(gate_grads, 1)
    return grad, cell_grad * forget_gate, grad.sum(0) if has_bias else None


def _rms_norm_backward(
    grad: Tensor, input: Tensor, shape: list[int], inverse_rms: Tensor, weight: None, output_mask: list[bool]
) -> tuple[Tensor, None]:
    """Without a weight, as the package calls it."""
    normalized = input * inverse_rms
    return (grad - normalized * (grad * normalized).mean(-1, keepdim=True)) * inverse_rms, None


_CUDA_ONLY: dict[str, Any] = {
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> str:
    """The kernel that torch selects for `scaled_dot_product_attention` on a GPU of this `capability`."""
    width, value_width, is_half = query.shape[-1], value.shape[-1], query.dtype in HALF_TYPES
    is_dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value)) and bool(query.shape[-2] * key.shape[-2])
    mask_needs_grad = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if capability >= (8, 0) and is_half and is_dense:
        fits_cudnn = max(width, value_width) <= 128 and width % 8 == value_width % 8 == 0 and key.shape[-2] > 1
        if capability >= (9, 0) and fits_cudnn and not mask_needs_grad and (dropout * 16).is_integer():
            return "cudnn"
        is_square = not is_causal or query.shape[-2] == key.shape[-2]
        if mask is None and width == value_width <= 256 and is_square:
            return "flash"
    alignment = 8 if is_half else 4
    is_aligned = width % alignment == value_width % alignment == 0
    return "efficient" if is_dense and is_aligned and query.dtype is not torch.float64 else "math"


class _AttentionKernel(torch.autograd.Function):
    """Attention as one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, options: Mapping[str, Any], name: str) -> Any:
        ctx.options, ctx.name = options, name
        ctx.save_for_backward(query, key, value, mask)
        values = [None if tensor is None else tensor.values for tensor in (query, key, value, mask)]
        record_launch(name)
        # the kernels return (batch, length, heads, width) in memory
        return DeviceTensor(cpu_attention(*values, **options).transpose(1, 2).contiguous().transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        leaves = []
        for tensor, needs_grad in zip(ctx.saved_tensors, ctx.needs_input_grad):
            leaves.append(None if tensor is None else tensor.values.detach().requires_grad_(needs_grad))
        with torch.enable_grad():
            output = cpu_attention(*leaves, **ctx.options)
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        gradients = iter(torch.autograd.grad(output, inputs, grad.values.to(output.dtype)))
        record_launch(f"{ctx.name}_backward")
        result = [DeviceTensor(next(gradients)) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return *result, None, None


def record_launch(name: str) -> None:
    """Record a launch of a kernel that is not an operator."""
    if _record is not None:
        _record.launches[name] += 1


def device_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` on the device, or on the CPU."""
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not isinstance(query, DeviceTensor):
        return cpu_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if attn_mask is not None and not isinstance(attn_mask, DeviceTensor):
        raise RuntimeError(f"The attention mask is on the CPU, {_calling_line()}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError(f"A mask of {attn_mask.dtype} for queries of {query.dtype}, {_calling_line()}")
    kernel = attention_kernel(query, key, value, attn_mask, dropout_p, is_causal)
    if _record is not None:
        _record.attention[kernel] += 1
    if kernel == "math":
        return cpu_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)
    if kernel == "efficient" and attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            record_launch("mask_to_additive")
        if attn_mask.stride(-1) != 1 or any(stride % 8 for stride in attn_mask.stride()[:-1]):
            record_launch("mask_alignment_copy")
    return _AttentionKernel.apply(query, key, value, attn_mask, options, f"attention_{kernel}")


def _sequence_ranges(
    bounds: tuple[list[int], list[int]], window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Slices of the queries and keys of each sequence with a query, and which keys each query attends to."""
    for start, stop, key_start, key_stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:]):
        if start == stop:
            continue
        rows = torch.arange(stop - start)[:, None] + (key_stop - key_start) - (stop - start)
        distance = rows - torch.arange(key_stop - key_start)
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            allowed &= distance <= window[0]
        if window[1] >= 0:
            allowed &= distance >= -window[1]
        yield slice(start, stop), slice(key_start, key_stop), allowed


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_query_length: int,
    max_key_length: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    """The variable-length kernel with its requirements."""
    bounds = query_bounds.tolist(), key_bounds.tolist()
    requirements = {
        "compute capability 8.0": capability >= (8, 0),
        "half precision": query.dtype in HALF_TYPES and query.dtype == key.dtype == value.dtype,
        "a head width that is a multiple of 8, at most 256": query.shape[-1] % 8 == 0 and query.shape[-1] <= 256,
        "int32 lengths": query_bounds.dtype == key_bounds.dtype == torch.int32,
        "lengths that cover all tokens": bounds[0][-1] == len(query) and bounds[1][-1] == len(key),
        "the length of the longest sequence": max(b - a for a, b in zip(bounds[0], bounds[0][1:])) == max_query_length,
        "the window of a causal mask": not is_causal or window_size_right == 0,
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise RuntimeError(f"The variable-length kernel requires {requirement}, {_calling_line()}")
    if _record is not None:
        _record.attention["varlen"] += 1
    context = torch.empty_like(query)
    for queries, keys, allowed in _sequence_ranges(bounds, (window_size_left, window_size_right)):
        batch = (tensor.transpose(0, 1)[None] for tensor in (query[queries], key[keys], value[keys]))
        context[queries] = cpu_attention(*batch, attn_mask=allowed, scale=scale)[0].transpose(0, 1)
    state = torch.zeros(2, dtype=torch.uint64)
    return context, query.new_zeros(query.shape[1], len(query), dtype=torch.float32), state, state[0], context[:0]


def _flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    log_sums: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_query_length: int,
    max_key_length: int,
    dropout: float,
    is_causal: bool,
    *state: Tensor,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; autograd is disabled within a dispatched operator."""
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    bounds, window = (query_bounds.tolist(), key_bounds.tolist()), (window_size_left, window_size_right)
    for queries, keys, allowed in _sequence_ranges(bounds, window):
        states = (query[queries], key[keys], value[keys], grad[queries])
        q, k, v, d_context = (tensor.transpose(0, 1).float() for tensor in states)
        probabilities = (q @ k.mT * scale).masked_fill(~allowed, float("-inf")).softmax(-1)
        d_probabilities = d_context @ v.mT
        d_scores = probabilities * (d_probabilities - (d_probabilities * probabilities).sum(-1, keepdim=True)) * scale
        for gradient, rows, values in zip(
            gradients, (queries, keys, keys), (d_scores @ k, d_scores.mT @ q, probabilities.mT @ d_context)
        ):
            gradient[rows] = values.transpose(0, 1).to(gradient.dtype)
    return tuple(gradients)


_CUDA_ONLY |= {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_backward": _flash_attention_backward,
}


def _patch_cuda() -> None:
    """Replace the functions of `torch.cuda` that need a driver."""
    properties = SimpleNamespace(total_memory=80 << 30, multi_processor_count=132, name="simulated GPU")
    stream = SimpleNamespace(device=DEVICE, wait_stream=lambda *_: None, synchronize=lambda: _read("stream"))
    constants = {"is_available": True, "is_initialized": True, "_is_compiled": True, "device_count": 1}
    constants |= {"current_device": 0, "get_device_name": "simulated GPU", "is_bf16_supported": True}
    constants |= {"get_device_properties": properties, "current_stream": stream, "_lazy_init": None}
    constants |= {"is_current_stream_capturing": False}
    constants |= dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"))
    constants |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0)
    constants |= {"get_rng_state_all": [], "empty_cache": None, "set_device": None, "reset_peak_memory_stats": None}
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    functions: dict[str, Any] = {
        "get_device_capability": lambda *_, **__: capability,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "synchronize": lambda *_, **__: _read("synchronize"),
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.backends.cudnn.is_available = lambda: False  # as in a CPU build: the recurrent layers of cuDNN need a driver
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)


def _patch_package() -> None:
    """The package treats subclasses of tensors as quantized; tensors on a real GPU are of no subclass."""

    def are_plain_tensors(*tensors: Tensor | None) -> bool:
        return all(tensor is None or type(tensor) in (nn.Parameter, Tensor, DeviceTensor) for tensor in tensors)

    for name, module in list(sys.modules.items()):
        if name.startswith("hf_ctxmodels") and hasattr(module, "are_plain_tensors"):
            module.are_plain_tensors = are_plain_tensors


@contextlib.contextmanager
def simulated_device(compute_capability: tuple[int, int] = (9, 0), *, float64: bool = True) -> Iterator[None]:
    """Make `cuda:0` available, with this compute capability; float64 tensors on it can raise TypeError, as on Apple's
    GPUs."""
    global capability, has_float64
    capability, has_float64 = compute_capability, float64
    _patch_package()
    with _Creation(), mock.patch("hf_ctxmodels.core.devices.has_float64", return_value=has_float64):
        yield


def to_device(model: nn.Module) -> nn.Module:
    """Move a model to the device; its tied weights remain tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    model.to("cuda")
    for (first, first_name), *duplicates in owners.values():
        for module, name in duplicates:
            module._parameters[name] = first._parameters[first_name]
    return model


_patch_cuda()
F.scaled_dot_product_attention = device_attention
