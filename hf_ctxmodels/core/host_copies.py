"""Host copies: the values of ids, masks and labels on the CPU, known without reading the device.

A read of a device tensor waits for all kernels launched before, and meanwhile no further kernel is launched. Checks,
layouts and positions of targets therefore read host copies. `CollatedBatch`, the result of the package's collators,
keeps its CPU tensors as host copies when it is moved to a device: a training step then reads nothing. A model that is
called with other tensors copies all of them to the host in one read (`host_copies_of_inputs`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.core import compiled_ops
from hf_ctxmodels.core.compiled_ops import is_compiled
from hf_ctxmodels.core.errors import CtxError

_MAX_COPIED_ELEMENTS = 1 << 22  # of one tensor; larger masks are copied only if their values are needed
_is_in_forward: ContextVar[bool] = ContextVar("is_in_forward", default=False)


class _HostCopy(NamedTuple):
    """Values of a tensor, valid for the versions of both; a copied or pickled tensor has none."""

    values: Tensor
    versions: tuple[int | None, int | None]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def host_copy(tensor: Tensor) -> Tensor:
    """The values of a tensor on the CPU: the tensor itself, its host copy, or a new copy, which reads the device.

    While a graph is traced, values are unavailable, and the tensor itself is returned. In an operator of a compiled
    graph, whose memory is reused, there are no host copies. Changes by `.data` are not noticed.

    Raises:
        CtxError: A CUDA graph is captured, which would repeat the layout of the captured batch.
    """
    if tensor.device.type == "cpu" or is_traced(tensor):
        return tensor
    if compiled_ops.is_in_operator():
        return tensor.detach().cpu()
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CtxError("A CUDA graph cannot capture a model whose layout depends on values.", hint="use torch.compile.")
    if (values := _valid_copy(tensor)) is None:
        values = tensor.detach().cpu()
        set_host_copy(tensor, values)
    return values


def set_host_copy(tensor: Tensor, values: Tensor | None) -> Tensor:
    """Attach the values of a device tensor, until one of them is changed in place; None removes them. Returns the
    tensor."""
    versions = _version(tensor), None if values is None else _version(values)
    tensor._host_copy = None if values is None else _HostCopy(values, versions)  # type: ignore[attr-defined]
    return tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting; the tensor is the host copy of the result."""
    if device.type == "cpu" or is_traced(values):
        return values.to(device)
    source = values.pin_memory() if device.type == "cuda" else values
    tensor = source.to(device, non_blocking=True)
    return tensor if compiled_ops.is_in_operator() else set_host_copy(tensor, values)


def on_host(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` of integer or bool tensors, computed on the CPU and copied to the device of the tensors.

    With a floating-point tensor it is computed on the device, and with a tensor without values on the meta device.
    """
    if any(tensor.is_floating_point() for tensor in tensors):
        return function(*tensors)
    if any(tensor.device.type == "meta" and is_traced(tensor) for tensor in tensors):
        return function(*(tensor.to("meta") for tensor in tensors))
    return to_device(function(*(host_copy(tensor) for tensor in tensors)), tensors[0].device)


def true_indices(mask: Tensor) -> Tensor:
    """(number,) int64 indices of the True values of the flattened mask, on its device."""
    if is_compiled():
        return compiled_ops.true_indices(mask)
    return to_device(host_copy(mask).flatten().nonzero().squeeze(1), mask.device)


def select_true(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor[mask]`: (number, ...) the values of a (*shape, ...) tensor where the (*shape) mask is True."""
    if not is_traced(tensor) and tensor.shape[: mask.dim()] != mask.shape:
        raise IndexError(f"A mask of shape {tuple(mask.shape)} cannot select from shape {tuple(tensor.shape)}.")
    return tensor.flatten(0, mask.dim() - 1)[true_indices(mask)]


def is_traced(tensor: Tensor) -> bool:
    """Whether values are unavailable, because a graph is being compiled or traced, or the tensor is on the meta device
    and has no host copy."""
    has_no_values = tensor.device.type == "meta" and _valid_copy(tensor) is None
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or has_no_values


def needs_static_sizes(tensor: Tensor) -> bool:
    """Whether no size may depend on values: they are unavailable, and the graph is not one of `torch.compile`."""
    return is_traced(tensor) and not is_compiled()


@contextmanager
def host_copies_of_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Give host copies to all integer and bool tensors among the inputs of a model, in a single read per device.

    Tensors of `torch.inference_mode` do not count changes in place: their copies hold for one call of the outermost
    model only.
    """
    devices: dict[torch.device, list[Tensor]] = {}
    for value in inputs:
        if _needs_host_copy(value):
            devices.setdefault(value.device, []).append(value)
    for tensors in devices.values():
        values = torch.cat([tensor.detach().flatten().long() for tensor in tensors]).cpu()
        for tensor, flat in zip(tensors, values.split([tensor.numel() for tensor in tensors]), strict=True):
            set_host_copy(tensor, flat.view(tensor.shape).to(tensor.dtype))
    token = _is_in_forward.set(True)
    try:
        yield
    finally:
        _is_in_forward.reset(token)


def _needs_host_copy(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.device.type == "cpu" or is_traced(value):
        return False
    if value.is_floating_point() or value.is_complex() or not value.numel():
        return False
    return value.numel() <= _MAX_COPIED_ELEMENTS and _valid_copy(value) is None


def _valid_copy(tensor: Tensor) -> Tensor | None:
    """The host copy, if neither tensor was changed after it was made."""
    copy: _HostCopy | None = getattr(tensor, "_host_copy", None)
    if copy is None or (tensor.is_inference() and not _is_in_forward.get()):
        return None
    return copy.values if copy.versions == (_version(tensor), _version(copy.values)) else None


def _version(tensor: Tensor) -> int | None:
    """The number of changes in place; None for an inference tensor, which does not count them."""
    return None if tensor.is_inference() else tensor._version


class CollatedBatch(dict[str, Any]):
    """A batch whose tensors keep their CPU tensors as host copies when `to` moves them to a device.

    `transformers.Trainer` and Accelerate's data loaders move batches by this method.
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "CollatedBatch":
        """Move the tensors to a device; by default from pinned memory, without waiting for the copies."""
        target = torch.device(device)

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.device.type != "cpu" or target.type == "cpu":
                return value.to(target)
            return to_device(value, target) if non_blocking else set_host_copy(value.to(target), value)

        return CollatedBatch({name: move(value) for name, value in self.items()})
