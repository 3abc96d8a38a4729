"""Matrix products of torch's oneDNN on a CPU: where they apply, the product, and weights in oneDNN's own order.

`torch.nn.functional.linear` uses MKL for single-precision products on a CPU, which uses half the width of the vector
units of processors that are not Intel's. torch also ships oneDNN, for half precision and compiled graphs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
HAS_BFLOAT16_PRODUCT = HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
_ROWS = 32  # for one row oneDNN would keep the common order


def can_use_onednn(*tensors: Tensor) -> bool:
    """Whether oneDNN applies: ordinary tensors on a CPU, in single precision, outside of autocast and of whatever
    records or transforms operators (compilation, export, `torch.func`, dispatch modes)."""
    return HAS_ONEDNN and not torch.is_autocast_enabled("cpu") and _are_multiplied(tensors, torch.float32)


def multiplies(*tensors: Tensor) -> bool:
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


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(rows, inner) times the transpose of (columns, inner), plus (columns,); without autograd.

    Args:
        left: The rows.
        right: The weight, ordinary or prepacked.
        bias: None for none.
    """
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prepack_weight(weight: Tensor) -> Tensor:
    """A copy of (columns, inner) in the order that `multiply` reads fastest; it is good for nothing else."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
