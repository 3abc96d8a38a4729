"""The method `ctx-low-bits` of transformers' `quantization_config`, and the replacement of modules."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ctxmodels.compression.int8.module_replacement import mark_initialized, names_in_class
from hf_ctxmodels.compression.low_bits.group_quantization import FEWEST, MOST
from hf_ctxmodels.compression.low_bits.modules import (
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    PackedEmbedding,
    PackedLinear,
)
from hf_ctxmodels.core.adapter_files import is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import is_plain_linear

METHOD = "ctx-low-bits"
_HEADS = {"classifier", "qa_outputs"}  # stay in single precision, as in Q-BERT


@dataclass
class CtxLowBitsConfig(QuantizationConfigMixin):
    """Which weights have how many bits.

    Attributes:
        groups: Groups of rows with a range of their own.
        bits: Path of a module -> bits of its weight.
    """

    quant_method: Any = METHOD
    groups: int = 128
    bits: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As in config.json."""
        return asdict(self)


class CtxLowBitsQuantizer(HfQuantizer):
    """Opens models with weights of a few bits."""

    quantization_config: CtxLowBitsConfig
    requires_calibration = True  # such a model is trained

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "least", "step"}
        config = self.quantization_config
        places = dict(model.named_modules())
        for stored in config.bits:
            for name in names_in_class(model, [stored]):
                module = places.get(name)
                if isinstance(module, nn.Linear | nn.Embedding):
                    mark_initialized(model, name)
                    _put(model, module, _packed(module, config.bits[stored], config.groups))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        return model.requires_grad_(False)

    def is_serializable(self) -> bool:
        """Yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No: codes have no gradients."""
        return False


def register_low_bits() -> None:
    """Make the method known to transformers; idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CtxLowBitsConfig)
        register_quantizer(METHOD)(CtxLowBitsQuantizer)


def find_quantizable_modules(model: nn.Module) -> tuple[list[str], list[str]]:
    """Paths of the linear maps but the last layer of a head, and of the tables; adapters stay in single precision.

    Raises:
        CtxError: There is no map, or an output layer is tied to a table.
    """
    if isinstance(model, PreTrainedModel) and model.all_tied_weights_keys:
        raise CtxError(
            f"The output layer of {type(model).__name__} is tied to its embeddings, which have bits of their own.",
            location="--quantize_bits",
            hint="fine-tune a head without a language model.",
        )
    modules = [(name, module) for name, module in model.named_modules() if not is_adapter_parameter(name)]
    maps = [
        name
        for name, module in modules
        if is_plain_linear(module) and name.rpartition(".")[2] not in _HEADS and min(module.weight.shape) > 1
    ]
    tables = [name for name, module in modules if type(module) is nn.Embedding]
    if not maps:
        raise CtxError(f"{type(model).__name__} has no linear map.", hint="take a Transformer.")
    return maps, tables


def replace_with_fake_quantized(model: nn.Module, bits: Mapping[str, int], groups: int) -> None:
    """Put maps and tables that compute with codes in the place of others; the parameters and their names stay.

    Raises:
        CtxError: A number of bits or of groups is impossible.
    """
    if groups < 1 or not all(FEWEST <= each <= MOST for each in bits.values()):
        raise CtxError(
            f"Weights have from {FEWEST} to {MOST} bits, in one group of rows or more.",
            location="--quantize_bits, --quantize_embedding_bits, --quantize_groups",
        )
    for name, number in bits.items():
        module = model.get_submodule(name)
        kind = FakeQuantizedLinear if isinstance(module, nn.Linear) else FakeQuantizedEmbedding
        _put(model, module, kind.of(module, number, groups))  # type: ignore[arg-type]


@torch.no_grad()
def pack_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that is stored with the bits it was trained with, and computes the same."""
    packed = copy.deepcopy(model)
    packed.__dict__.pop("forward", None)  # what training put around it
    config = CtxLowBitsConfig()
    for name, module in [*packed.named_modules()]:
        if isinstance(module, FakeQuantizedLinear | FakeQuantizedEmbedding):
            config.bits[name], config.groups = module.bits, module.groups
            _put(packed, module, _packed(module, module.bits, module.groups).store(module.weight))
            if isinstance(module, FakeQuantizedLinear) and module.bias is not None:
                packed.get_submodule(name).bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    object.__setattr__(packed, "hf_quantizer", CtxLowBitsQuantizer(config, pre_quantized=True))
    packed.config.quantization_config = config
    packed.is_quantized, packed.quantization_method = True, METHOD  # type: ignore[assignment]
    return packed.requires_grad_(False).eval()


def _packed(module: Any, bits: int, groups: int) -> PackedLinear | PackedEmbedding:
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(module.num_embeddings, module.embedding_dim, bits, groups)
    return PackedLinear(module.in_features, module.out_features, module.bias is not None, bits, groups)


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """In every place where the old module stands."""
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
