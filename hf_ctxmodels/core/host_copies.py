"""Host copies: the values of ids, masks and labels on the CPU, known without reading the device.

A read of a device tensor waits for all kernels launched before, and meanwhile no further kernel is launched. Checks,
layouts and positions of targets therefore read host copies. `CollatedBatch`, the result of the package's collators,
keeps its CPU tensors as host copies when it is moved to a device: a training step then reads nothing. A model that is
called with other tensors copies all of them to the host in one read (`host_copies_of_inputs`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.core import compiled_ops
from hf_ctxmodels.core.compiled_ops import is_compiled

_MAX_COPIED_ELEMENTS = 1 << 22  # of one tensor; larger masks are copied only if their values are needed
_is_in_forward: ContextVar[bool] = ContextVar("is_in_forward", default=False)


def host_copy(tensor: Tensor) -> Tensor:
    """The values of a tensor on the CPU: the tensor itself, its host copy, or a new copy, which reads the device.

    While a graph is traced, values are unavailable, and the tensor itself is returned.
    """
    if tensor.device.type == "cpu" or is_traced(tensor):
        return tensor
    if not _has_host_copy(tensor):
        set_host_copy(tensor, tensor.detach().cpu())
    values: Tensor = tensor._host_copy[1]  # type: ignore[attr-defined]
    return values


def set_host_copy(tensor: Tensor, values: Tensor) -> Tensor:
    """Declare the values of a device tensor, which hold until it is changed in place; returns the tensor."""
    tensor._host_copy = (_version(tensor), values)  # type: ignore[attr-defined]
    return tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting; the tensor is the host copy of the result."""
    if device.type in ("cpu", "meta") or is_traced(values):
        return values.to(device)
    source = values.pin_memory() if device.type == "cuda" else values
    return set_host_copy(source.to(device, non_blocking=True), values)


def on_host(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, computed from the host copies and copied to the device of the tensors.

    Floating-point tensors have no host copies: the function of a floating-point tensor is computed on its device.
    """
    if tensors[0].is_floating_point():
        return function(*tensors)
    return to_device(function(*(host_copy(tensor) for tensor in tensors)), tensors[0].device)


def true_indices(mask: Tensor) -> Tensor:
    """(number,) int64 indices of the True values of the flattened mask, on its device."""
    if is_compiled():
        return compiled_ops.true_indices(mask)
    if is_traced(mask):
        return mask.flatten().nonzero().squeeze(1)
    return to_device(host_copy(mask).flatten().nonzero().squeeze(1), mask.device)


def select_true(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor[mask]`: (number, ...) the values of a (*shape, ...) tensor where the (*shape) mask is True."""
    return tensor.flatten(0, mask.dim() - 1)[true_indices(mask)]


def is_traced(tensor: Tensor) -> bool:
    """Whether values are unavailable, because a graph is being compiled or traced, or the device is meta."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type == "meta"


def needs_static_sizes(tensor: Tensor) -> bool:
    """Whether no size may depend on values: they are unavailable, and the graph is not one of `torch.compile`."""
    return is_traced(tensor) and not is_compiled()


@contextmanager
def host_copies_of_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Give host copies to all integer and bool tensors among the inputs of a model, in a single read.

    Tensors of `torch.inference_mode` do not record changes in place, so that their copies hold for one call of the
    outermost model only.
    """
    tensors = [tensor for tensor in inputs if _needs_host_copy(tensor)]
    if tensors:
        values = torch.cat([tensor.detach().flatten().long() for tensor in tensors]).cpu()
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, copied in zip(tensors, values.split(sizes), strict=True):
            set_host_copy(tensor, copied.view(tensor.shape).to(tensor.dtype))
    token = _is_in_forward.set(True)
    try:
        yield
    finally:
        _is_in_forward.reset(token)


def _needs_host_copy(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.device.type == "cpu" or is_traced(value):
        return False
    is_number = value.is_floating_point() or value.is_complex()
    if is_number or not value.numel() or value.numel() > _MAX_COPIED_ELEMENTS:
        return False
    return not _has_host_copy(value) or (value.is_inference() and not _is_in_forward.get())


def _has_host_copy(tensor: Tensor) -> bool:
    copy = getattr(tensor, "_host_copy", None)
    return copy is not None and copy[0] == _version(tensor)


def _version(tensor: Tensor) -> int | None:
    """The number of changes in place; None for an inference tensor, which does not count them."""
    return None if tensor.is_inference() else tensor._version


class CollatedBatch(dict[str, Any]):
    """A batch whose tensors keep their CPU tensors as host copies when `to` moves them to a device.

    `transformers.Trainer` and Accelerate's data loaders move batches by this method.
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "CollatedBatch":
        """Move the tensors to a device; by default without waiting for the copies."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            moved = value.to(device, non_blocking=non_blocking)
            return moved if moved.device.type in ("cpu", "meta") else set_host_copy(moved, host_copy(value))

        return CollatedBatch({name: move(value) for name, value in self.items()})
