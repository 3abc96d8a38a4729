"""Memory of a training step, counted on the meta device: no weight is allocated."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from hf_ctxmodels.core.devices import meta_autocast
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.optimizers import make_optimizer

META = torch.device("meta")
GPU_BYTES = 80e9
_RESERVED_BYTES = 4e9  # CUDA context, NCCL, workspaces, and fragmentation
_MAX_RANKS = 4096
_CAST_FUNCTIONS = {F.linear, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm, F.scaled_dot_product_attention}
_CAST_FUNCTIONS |= {Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch.conv1d, F.conv1d}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one process.

    Attributes:
        parameters, gradients, optimizer_state: Bytes of the trained weights and of what has their shape.
        activations: Peak of all other tensors in the forward and backward pass.
        largest_block: Bytes of the largest module that fully sharded data parallel gathers at once.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    largest_block: int

    def per_rank(self, ranks: int) -> dict[str, float]:
        """Bytes on each of several ranks of fully sharded data parallel; one rank shards nothing."""
        gathered = 0 if ranks == 1 else 2 * self.largest_block  # the block in use, and the next one
        sharded = {name: getattr(self, name) / ranks for name in ("parameters", "gradients", "optimizer_state")}
        return {**sharded, "activations": self.activations + gathered}

    def smallest_number_of_gpus(self) -> int | None:
        """Ranks, a power of 2, with `GPU_BYTES` each that hold a sharded run; None if the activations do not fit."""
        for ranks in (2**power for power in range(_MAX_RANKS.bit_length())):
            if sum(self.per_rank(ranks).values()) + _RESERVED_BYTES <= GPU_BYTES:
                return ranks
        return None


class _AllocationPeak(TorchDispatchMode):
    """Counts the bytes of tensors that are created on the meta device while it is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        for leaf in tree_leaves(result):
            if _is_meta(leaf) and leaf.untyped_storage() not in inputs:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._storages:
            self._storages.add(storage)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.allocated -= size


class _EmulatedGPU(TorchFunctionMode):
    """Operations of a GPU on the meta device: attention kernels without probabilities, masks of dropout in one byte,
    and with a dtype the casts of `torch.autocast`, of which weights are kept until the end."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._weights: dict[Tensor, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None and function in _CAST_FUNCTIONS and "out" not in kwargs:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        elif self._dtype is not None and function is F.layer_norm:
            args, kwargs = tree_map(lambda value: value.float() if _is_meta(value) else value, (args, kwargs))
        if function is F.scaled_dot_product_attention and _is_meta(args[0]):
            return _attention(*args, **kwargs)
        if function is F.dropout and _is_meta(args[0]):
            return _dropout(*args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if not _is_meta(value) or not value.is_floating_point() or value.dtype == self._dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self._dtype)
        if value not in self._weights:
            self._weights[value] = value.to(self._dtype)
        return self._weights[value]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2]).to(query.dtype)
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, **options)[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _Dropout.apply(input) if training and p > 0 else input


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(input, dtype=torch.bool))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def measure_step(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    arguments: LoopArguments,
    dtype: torch.dtype | None = None,
) -> StepMemory:
    """Count the memory of a step of a model on the meta device.

    Args:
        model: Model with a training loss.
        batch: Collated batch of one process, on the CPU.
        arguments: Optimizer of the run.
        dtype: Data type of autocast; None for the data type of the weights.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _discarded_gradients(parameters), _AllocationPeak() as memory:
        token = meta_autocast.set(dtype)
        try:
            with _EmulatedGPU(dtype):
                loss = model(**CollatedBatch(batch).to(META)).loss
            loss.backward()
        finally:
            meta_autocast.reset(token)
    optimizer = make_optimizer(model, arguments)
    for group in optimizer.param_groups:
        group["fused"] = False  # impossible on the meta device
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    states = tree_leaves([optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state])
    size = sum(parameter.nbytes for parameter in model.parameters())
    scale = 1.0 if dtype is None else dtype.itemsize / 4
    return StepMemory(
        parameters=size,
        gradients=sum(parameter.nbytes for parameter in parameters),
        optimizer_state=sum(state.nbytes for state in states if isinstance(state, Tensor) and state.numel() > 1),
        activations=memory.peak,
        largest_block=int(scale * max(_block_sizes(model), default=size)),
    )


@contextmanager
def _discarded_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Free each gradient when it has been accumulated."""

    def discard(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(discard) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_sizes(model: nn.Module) -> Iterator[int]:
    """Bytes of the modules that are gathered at once: the items of module lists, and the token embeddings."""
    for module in model.modules():
        children = module if isinstance(module, nn.ModuleList) else ()
        for block in [*children, *([module] if isinstance(module, nn.Embedding) else [])]:
            yield sum(parameter.nbytes for parameter in block.parameters())
