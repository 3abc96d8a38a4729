"""The quantization method `ctx-low-bits` of transformers, and replacement of modules."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer

from hf_ctxmodels.compression.int8.quantizer import CodesConfig, CodesQuantizer
from hf_ctxmodels.compression.low_bits.modules import (
    MAX_BITS,
    MIN_BITS,
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    PackedEmbedding,
    PackedLinear,
)
from hf_ctxmodels.compression.replacement import mark_initialized, names_in_class, replace_children
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import is_plain_linear

METHOD = "ctx-low-bits"
_HEADS = {"classifier", "qa_outputs"}  # their last layers stay in float32, as in Q-BERT


@dataclass
class CtxLowBitsConfig(CodesConfig):
    """Low-bit quantization: the number of groups of rows, each with its own range, and module name -> bits."""

    quant_method: Any = METHOD
    groups: int = 128
    bits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bits(self.bits, self.groups)


class CtxLowBitsQuantizer(CodesQuantizer):
    """Loads models with packed low-bit weights."""

    quantization_config: CtxLowBitsConfig
    requires_calibration = True  # quantized weights result from training
    code_names, scale_names = ("packed",), ("step",)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "least", "step"}
        config = self.quantization_config
        modules = dict(model.named_modules())
        saved_bits, config.bits = config.bits, {}
        for saved_name, bits in saved_bits.items():
            for name in names_in_class(model, [saved_name]):
                module = modules.get(name)
                if isinstance(module, nn.Linear | nn.Embedding):
                    config.bits[name] = bits
                    mark_initialized(model, name)
                    replace_children(model, {id(module): _new_packed(module, bits, config.groups)})


def check_bits(bits: Mapping[str, int], groups: int) -> None:
    """Raise CtxError unless the numbers of bits and of groups are supported."""
    if groups < 1 or not all(MIN_BITS <= num_bits <= MAX_BITS for num_bits in bits.values()):
        raise CtxError(
            f"Expected {MIN_BITS} to {MAX_BITS} bits and at least one group, got {sorted(set(bits.values()))} bits and "
            f"{groups} groups.",
            location=METHOD,
            hint="correct --quantize, or quantization_config in config.json.",
        )


def register_low_bits() -> None:
    """Register the method with transformers; idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CtxLowBitsConfig)
        register_quantizer(METHOD)(CtxLowBitsQuantizer)


def find_quantizable_modules(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the linear layers, without output layers of heads, and of the embeddings, without adapters; raises
    CtxError if an output layer is tied to the embeddings."""
    if isinstance(model, PreTrainedModel) and model.all_tied_weights_keys:
        raise CtxError(
            f"The output layer of {type(model).__name__} is tied to its embeddings, whose bits differ.",
            location="--quantize q-bert:bits",
            hint="fine-tune a model without a language-model head.",
        )
    modules = [(name, module) for name, module in model.named_modules() if not is_adapter_parameter(name)]
    linear_layers = {name: module for name, module in modules if is_plain_linear(module)}
    for head in [name for name, _ in modules if name.rpartition(".")[2] in _HEADS]:
        in_head = [name for name in linear_layers if name == head or name.startswith(f"{head}.")]
        for name in in_head[-1:]:
            del linear_layers[name]
    names = [name for name, module in linear_layers.items() if min(module.weight.shape) > 1]
    embeddings = [name for name, module in modules if type(module) is nn.Embedding]
    if not names:
        raise CtxError(f"{type(model).__name__} has no linear layer.", hint="use a Transformer.")
    return names, embeddings


def replace_with_fake_quantized(model: nn.Module, bits: Mapping[str, int], groups: int) -> None:
    """Replace linear layers and embeddings by fake-quantized ones with the same parameters and names; raises CtxError
    as `check_bits`."""
    check_bits(bits, groups)
    for name, num_bits in bits.items():
        module = model.get_submodule(name)
        module_class = FakeQuantizedLinear if isinstance(module, nn.Linear) else FakeQuantizedEmbedding
        replacement = module_class.from_module(module, num_bits, groups)  # type: ignore[arg-type]
        replace_children(model, {id(module): replacement})


@torch.no_grad()
def pack_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with packed weights and the same outputs."""
    packed = copy.deepcopy(model)
    packed.__dict__.pop("forward", None)  # what training put around it
    config = CtxLowBitsConfig()
    for name, module in [*packed.named_modules()]:
        if isinstance(module, FakeQuantizedLinear | FakeQuantizedEmbedding):
            config.bits[name], config.groups = module.bits, module.groups
            packed_module = _new_packed(module, module.bits, module.groups).store(module.weight)
            replace_children(packed, {id(module): packed_module})
            if isinstance(module, FakeQuantizedLinear) and module.bias is not None:
                packed.get_submodule(name).bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    CtxLowBitsQuantizer(config, pre_quantized=True).attach(packed)
    return packed


def _new_packed(module: Any, bits: int, groups: int) -> PackedLinear | PackedEmbedding:
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(module.num_embeddings, module.embedding_dim, bits, groups)
    return PackedLinear(module.in_features, module.out_features, module.bias is not None, bits, groups)
