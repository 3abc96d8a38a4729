"""Names of adapter parameters in files: AdapterHub's names for the families that it supports."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.insertion import get_invertible_adapters, list_sublayer_adapters
from hf_ctxmodels.downstream.adapters.modules import SublayerAdapters


@dataclass(frozen=True)
class FileLayout:
    """Names of a family's adapters in files.

    Attributes:
        prefix: Prefix of all names; None for the base model's prefix.
        block_patterns: Pattern of a block's name in the model -> its name in files.
        sublayers: Sub-layer -> its name within the block; "encoder.feed_forward" applies to an encoder only.
    """

    prefix: str | None
    block_patterns: Mapping[str, str]
    sublayers: Mapping[str, str]

    def block_name(self, name: str) -> str:
        """Name of a block in files."""
        for pattern, replacement in self.block_patterns.items():
            name, num_replaced = re.subn(pattern, replacement, name)
            if num_replaced:
                return name
        return name

    def sublayer_name(self, block_name: str, sublayer: str) -> str:
        """Name of a sub-layer's adapters in files."""
        stack = block_name.split(".")[0]
        return self.sublayers.get(f"{stack}.{sublayer}", self.sublayers[sublayer])


_SUBLAYERS = {
    "attention": "attention_adapters",
    "cross_attention": "cross_attention_adapters",
    "feed_forward": "output_adapters",
}
_NATIVE = FileLayout(None, {}, _SUBLAYERS)
_BERT = FileLayout(None, {r"^layers\.": "encoder.layer."}, {"attention": "attention.output", "feed_forward": "output"})
_LAYOUTS = {
    **dict.fromkeys(("bert", "ernie", "roberta", "xlm-roberta", "electra"), _BERT),
    "albert": FileLayout(
        "albert",
        {r"^layers\.(\d+)\.": r"encoder.albert_layer_groups.\1.albert_layers."},
        {"attention": "attention.attention_adapters", "feed_forward": "output_adapters"},
    ),
    "gpt2": FileLayout("transformer", {r"^layers\.": "h."}, _SUBLAYERS),
    "bart": FileLayout("model", {}, _SUBLAYERS),
    "t5": FileLayout(
        "transformer",
        {r"^(encoder|decoder)\.layers\.": r"\1.block."},
        {
            "attention": "layer.0",
            "cross_attention": "layer.1",
            "encoder.feed_forward": "layer.1",
            "feed_forward": "layer.2",
        },
    ),
}


def file_layout(base: CtxPreTrainedModel) -> FileLayout:
    """The file layout of a base model."""
    return _LAYOUTS.get(base.reference_model_type or "", _NATIVE)


def model_types(base: CtxPreTrainedModel) -> tuple[str, ...]:
    """Accepted values of `model_type` in files; the first one is written."""
    model_type = base.config.model_type
    return tuple(dict.fromkeys((base.reference_model_type or model_type, model_type)))


def adapter_tensors(base: CtxPreTrainedModel, name: str) -> dict[str, Tensor]:
    """The parameters of an adapter by their names in files."""
    tensors: dict[str, Tensor] = {}
    for prefix, adapters in _named_sublayer_adapters(base):
        if name in adapters.members:
            tensors |= _named_parameters(f"{prefix}.adapters.{name}", adapters.members[name])
    invertible_adapters = get_invertible_adapters(base)
    if invertible_adapters is not None and name in invertible_adapters.members:
        stack = "encoder." if base.config.is_encoder_decoder else ""
        prefix = f"{_prefix(base)}.{stack}invertible_adapters.{name}"
        tensors |= _named_parameters(prefix, invertible_adapters.members[name])
    return tensors


def fusion_tensors(base: CtxPreTrainedModel, fusion: str) -> dict[str, Tensor]:
    """The parameters of a fusion by their names in files."""
    tensors: dict[str, Tensor] = {}
    for prefix, adapters in _named_sublayer_adapters(base):
        if fusion in adapters.fusions:
            tensors |= _named_parameters(f"{prefix}.adapter_fusion_layer.{fusion}", adapters.fusions[fusion])
    return tensors


def current_name(key: str) -> str:
    """AdapterHub's current name of a parameter in a file of any release."""
    key = re.sub(r"\.(attention|layer)_text_(task|lang)_adapters\.", ".adapters.", key)
    return re.sub(r"(^|\.)invertible_lang_adapters\.", r"\1invertible_adapters.", key)


def _prefix(base: CtxPreTrainedModel) -> str:
    return file_layout(base).prefix or base.base_model_prefix


def _named_sublayer_adapters(base: CtxPreTrainedModel) -> Iterator[tuple[str, SublayerAdapters]]:
    layout = file_layout(base)
    for block, sublayer, adapters in list_sublayer_adapters(base):
        yield f"{_prefix(base)}.{layout.block_name(block.name)}.{layout.sublayer_name(block.name, sublayer)}", adapters


def _named_parameters(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{key}": value for key, value in module.state_dict(keep_vars=True).items()}
