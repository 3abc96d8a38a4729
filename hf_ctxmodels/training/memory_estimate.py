"""Memory of a training step, counted on the meta device: no weight is allocated."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from hf_ctxmodels.core.devices import meta_autocast
from hf_ctxmodels.core.errors import wrap_errors
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.data import ExampleSet, load_documents
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.optimizers import make_optimizer
from hf_ctxmodels.training.pretraining import (
    PretrainingArguments,
    make_model,
    make_objective,
    model_config,
    require_tokenizer_source,
    resolve_family,
)
from hf_ctxmodels.training.training_step import enable_gradient_checkpointing

META = torch.device("meta")
GPU_BYTES = 80e9
_HINT = "train it for a minute by --dry_run."
_RESERVED_BYTES = 4e9  # CUDA context, NCCL, workspaces, and fragmentation
_CAST_FUNCTIONS = {F.linear, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm, F.scaled_dot_product_attention}
_CAST_FUNCTIONS |= {Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch.conv1d, F.conv1d}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one process.

    Attributes:
        parameters, gradients, optimizer_state: Bytes of the trained weights and of what has their shape.
        activations: Peak of all other tensors in the forward and backward pass.
        sharded_activations: The same without the weights that autocast has converted: fully sharded data parallel
            converts shards.
        largest_block: Bytes of the largest module that it gathers at once.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    sharded_activations: int
    largest_block: int

    def per_rank(self, ranks: int) -> dict[str, float]:
        """Bytes on each of several ranks of fully sharded data parallel; one rank shards nothing."""
        sharded = {name: getattr(self, name) / ranks for name in ("parameters", "gradients", "optimizer_state")}
        if ranks == 1:
            return {**sharded, "activations": self.activations}
        gathered = 2 * self.largest_block  # the block in use, and the next one
        return {**sharded, "activations": self.sharded_activations + gathered}

    def fits(self, ranks: int) -> bool:
        """Whether the run fits GPUs of `GPU_BYTES`."""
        return sum(self.per_rank(ranks).values()) + _RESERVED_BYTES <= GPU_BYTES

    def smallest_number_of_gpus(self) -> int | None:
        """Ranks, a power of 2, with `GPU_BYTES` each that hold a sharded run; None if the activations do not fit."""
        return next((ranks for ranks in (2**power for power in range(13)) if self.fits(ranks)), None)


class _AllocationPeak(TorchDispatchMode):
    """Counts the bytes of tensors that are created on the meta device while it is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self.is_paused = False
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
        if storage not in self._storages and not self.is_paused:
            self._storages.add(storage)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.allocated -= size


class _EmulatedGPU(TorchFunctionMode):
    """Operations of a GPU on the meta device: attention kernels without probabilities, masks of dropout in one byte,
    and with a dtype the casts of `torch.autocast`, of which weights are kept until the mode ends.

    Args:
        dtype: Data type of autocast; None without autocast.
        memory: Counts allocations.
        count_weights: Whether to count the casts of weights.
    """

    def __init__(self, dtype: torch.dtype | None, memory: _AllocationPeak, count_weights: bool) -> None:
        super().__init__()
        self._dtype, self._memory, self._count_weights = dtype, memory, count_weights
        self._cast_weights: dict[Tensor, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._cast_weights.clear()

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
        if value not in self._cast_weights:
            self._memory.is_paused = not self._count_weights
            self._cast_weights[value] = value.to(self._dtype)
            self._memory.is_paused = False
        return self._cast_weights[value]


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


def estimate_memory(arguments: PretrainingArguments, loop_arguments: LoopArguments) -> Iterator[str]:
    """Yield the lines of a table with the memory of a run on GPUs, and the smallest number of GPUs that hold it.

    The batch is text of the package, repeated; neither data nor weights are read. Activations are of a GPU, in the data
    type of `--dtype`, by default bfloat16.

    Raises:
        CtxError: The objective needs other data than text, or the model cannot run on the meta device.
    """
    tokenizer = load_tokenizer(require_tokenizer_source(arguments))
    family = resolve_family(arguments)
    _, objective = make_objective(family, tokenizer, arguments, loop_arguments.seed)
    config = model_config(family, tokenizer, arguments)
    model = make_model(config, objective, tokenizer, arguments, without_memory=True).to(META)
    model.tie_weights()
    batch_size = loop_arguments.per_device_batch_size
    dtype = getattr(torch, loop_arguments.dtype or "bfloat16")
    with wrap_errors("The memory of this model cannot be estimated", location=f"--family {family.name}", hint=_HINT):
        memory = measure_step(
            model, largest_batch(objective, batch_size), loop_arguments, None if dtype is torch.float32 else dtype
        )
    smallest = memory.smallest_number_of_gpus()
    lengths = f"{batch_size} x {arguments.max_length:,} tokens per GPU"
    yield f"{model.num_parameters():,} parameters; {lengths}, {str(dtype).removeprefix('torch.')}; GB on each GPU:"
    names = ("parameters", "gradients", "optimizer_state", "activations")
    yield "".join(["GPUs (FSDP)", *(f"{name.replace('_', ' '):>17}" for name in names), f"{'total':>9}"])
    for ranks in sorted({1, 8, smallest or 1024}):
        sizes = memory.per_rank(ranks)
        yield (
            f"{ranks:<11}"
            + "".join(f"{sizes[name] / 1e9:>17.2f}" for name in names)
            + f"{sum(sizes.values()) / 1e9:>9.2f}"
        )
    if smallest is None:
        yield f"no number of {GPU_BYTES / 1e9:.0f} GB GPUs holds the activations: lower --per_device_batch_size" + (
            "" if loop_arguments.gradient_checkpointing else ", or pass --gradient_checkpointing"
        )
    else:
        reserve = f"{_RESERVED_BYTES / 1e9:.0f} GB in reserve"
        yield f"smallest number of {GPU_BYTES / 1e9:.0f} GB GPUs, with {reserve}: {smallest}"


def largest_batch(objective: Objective, size: int) -> dict[str, Any]:
    """The longest of several batches of the package's text, collated."""
    num_examples = 4 * size
    documents = _demo_documents(num_words=2 * num_examples * objective.max_length)
    examples = ExampleSet.build(islice(objective.examples(documents), num_examples))
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]["input_ids"]))
    return objective.collate([examples[index] for index in order[-size:]])


def _demo_documents(num_words: int) -> Iterator[list[str]]:
    """Documents of the package's text, repeated, with at least this number of words."""
    for document in cycle(load_documents("demo")):
        if num_words <= 0:
            return
        yield document
        num_words -= sum(len(sentence.split()) for sentence in document)


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
        arguments: Optimizer and gradient checkpointing of the run.
        dtype: Data type of autocast; None for the data type of the weights.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peaks = [_peak_of_step(model, batch, dtype, arguments.gradient_checkpointing, count) for count in (True, False)]
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
        activations=peaks[0],
        sharded_activations=peaks[1],
        largest_block=int(scale * max(_block_sizes(model), default=size)),
    )


def _peak_of_step(
    model: PreTrainedModel, batch: Mapping[str, Tensor], dtype: torch.dtype | None, checkpointing: bool, casts: bool
) -> int:
    """Peak of the bytes allocated in a step, without gradients of weights, with or without `casts` of weights."""

    def discard_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    memory = _AllocationPeak()
    gpu = _EmulatedGPU(dtype, memory, casts)
    model.train()
    if checkpointing:  # the backward pass calls the layers without the mode
        enable_gradient_checkpointing(model, {"context_fn": lambda: (nullcontext(), gpu)})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(discard_gradient) for parameter in trained]
    token = meta_autocast.set(dtype)
    try:
        with memory:
            with gpu:
                loss = model(**CollatedBatch(batch).to(META)).loss
            loss.backward()
    finally:
        meta_autocast.reset(token)
        for handle in handles:
            handle.remove()
    return memory.peak


def _block_sizes(model: nn.Module) -> Iterator[int]:
    """Bytes of the modules that are gathered at once: the items of module lists, and the token embeddings."""
    for module in model.modules():
        children = module if isinstance(module, nn.ModuleList) else ()
        for block in [*children, *([module] if isinstance(module, nn.Embedding) else [])]:
            yield sum(parameter.nbytes for parameter in block.parameters())
