"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3) by the plans of transformers.

Layers name the styles of their linear layers in `tp_styles`. The plan of a model is collected from them, and
transformers shards the weights while it loads them. Attention heads and the intermediate features of feed-forward
networks are divided among the processes; hidden states and all other weights are replicated.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.core_model_loading import WeightConverter
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, PackedColwiseParallel, TensorParallelLayer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import is_quantized

UNSHARDED_HINT = "load it without tp_plan; accelerate launch --config_file fsdp2.yaml trains it on several GPUs."


class PackedProjections(PackedColwiseParallel):
    """Column-wise sharding of a linear layer with `split_factor` projections, such as queries, keys and values: each
    process has the same slice of all of them. Unlike transformers' `packed_colwise`, it also shards a bias."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Shard the weight (split_factor * out, in) or the bias (split_factor * out,) along the first dimension."""
        weight = module._parameters.get(param)
        if weight is not None:
            placement = _StridedShard(0, split_factor=self.split_factor)
            sharded = distribute_tensor(weight, mesh, [placement], src_data_rank=None)
            module._parameters[param] = nn.Parameter(sharded, requires_grad=weight.requires_grad)


class LocalFeatures(TensorParallelLayer):
    """Selects the features of this process from the output of a replicated module, such as a bias of attention heads.
    Its weights have the same, complete gradient in all processes."""

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """(..., out) -> (..., out / processes)."""
        replicated = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return replicated.redistribute(placements=[Shard(-1)]).to_local()


PACKED_QKV, PACKED_KV, LOCAL_FEATURES = "ctx_packed_qkv", "ctx_packed_kv", "ctx_local_features"
ALL_PARALLEL_STYLES.register(PACKED_QKV, PackedProjections(split_factor=3))
ALL_PARALLEL_STYLES.register(PACKED_KV, PackedProjections(split_factor=2))
ALL_PARALLEL_STYLES.register(LOCAL_FEATURES, LocalFeatures())


def is_tensor_parallel(model: object) -> bool:
    """Whether a model is sharded by tensor parallelism."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def make_tp_plan(model: nn.Module) -> dict[str, str]:
    """Name of a submodule, with "*" for numbers -> style, from the `tp_styles` of the layers."""
    return {
        replace_layer_number_by_wildcard(f"{name}.{child}"): style
        for name, module in model.named_modules()
        for child, style in getattr(module, "tp_styles", {}).items()
    }


def check_shardable(model: Any, num_processes: int) -> None:
    """Raise CtxError unless the model has layers with `tp_styles`, which are linear layers and embeddings that are not
    quantized, and whose sharded features the processes divide.

    With shards of different sizes, dropout would consume different amounts of random numbers in the processes, and the
    replicated hidden states would differ after the next dropout.
    """
    if not model.tp_plan:
        raise CtxError(f"{type(model).__name__} has no layers for tensor parallelism.", hint=UNSHARDED_HINT)
    if is_quantized(model):
        raise CtxError("A quantized model cannot be sharded by tensor parallelism.", hint=UNSHARDED_HINT)
    for name, module in model.named_modules():
        for child, style in getattr(module, "tp_styles", {}).items():
            if type(layer := getattr(module, child)) not in (nn.Linear, nn.Embedding):
                raise CtxError(
                    f"A {type(layer).__name__} cannot be sharded by tensor parallelism.",
                    location=f"{name}.{child}",
                    hint=UNSHARDED_HINT,
                )
            if style == "colwise" and layer.out_features % num_processes:
                raise CtxError(
                    f"{layer.out_features} features cannot be divided among {num_processes} processes.",
                    location=f"{name}.{child}",
                    hint="start a number of processes that divides intermediate_size and the number of heads.",
                )


def shard_heads(model: nn.Module, rank: int, size: int) -> None:
    """Select the heads of a process in all attention layers whose projections are sharded."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "shard_heads") and isinstance(module.out_proj.weight, DTensor):
            module.shard_heads(rank, size)


def check_loaded_layout(model: Any) -> None:
    """Raise CtxError if sharded weights were converted from the layout of another implementation.

    transformers shards the weights of the file before their conversion. With separate queries, keys and values in the
    file, a process would get the wrong rows of their concatenation.
    """
    sharded = {
        ".".join(name.split(".")[-2:]) for name, weight in model.named_parameters() if isinstance(weight, DTensor)
    }
    for conversion in model._weight_conversions:
        targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else []
        if any(target.endswith(name) for target in targets for name in sharded):
            raise CtxError(
                "Tensor parallelism reads only checkpoints in the layout of this package.",
                location=type(model).__name__,
                hint="convert the checkpoint once: load it without tp_plan, and call save_pretrained(DIR).",
            )
