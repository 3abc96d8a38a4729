"""Shared parts of the families' weight conversions, and conversion operations that transformers lacks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from hf_ctxmodels.core.errors import CtxError

# names of the first releases, for loading only
LEGACY_NORM_RENAMINGS = [
    WeightRenaming(r"LayerNorm\.gamma", r"LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta", r"LayerNorm.bias"),
]

_waiting: dict[str, list[WeightTransform]] = {}


def register_conversion(model_type: str, conversion: list[WeightTransform]) -> None:
    """Register a family's table with transformers when the first model is made.

    Registering makes transformers build the tables of all its own models, which takes a fifth of this package's import
    and which a process that opens no model does without.
    """
    _waiting[model_type] = conversion


def register_pending_conversions() -> None:
    """Register what waits for it; called by every model that is made."""
    while _waiting:
        register_checkpoint_conversion_mapping(*_waiting.popitem())


class FirstAvailable(ConversionOps):
    """Several reference names of one parameter: the first one in a file is loaded; all are saved."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The tensor of the first source in the file."""
        found = next(input_dict[source] for source in source_patterns if source in input_dict)
        return {target_patterns[0]: single_tensor(found)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Save the tensor under every name."""
        return _Repeated()


class _Repeated(ConversionOps):
    """One tensor under several names."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """A copy for every target: safetensors refuses shared memory."""
        (found,) = input_dict.values()
        return {target: single_tensor(found).clone() for target in target_patterns}

    @property
    def reverse_op(self) -> ConversionOps:
        """Load the first."""
        return FirstAvailable()


POST_NORM_RENAMINGS = [
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"encoder\.layer\.", r"layers."),
    WeightRenaming(r"attention\.output\.dense\.", r"attention.out_proj."),
    WeightRenaming(r"attention\.output\.LayerNorm\.", r"attention_norm."),
    WeightRenaming(r"intermediate\.dense\.", r"feed_forward.up_proj."),
    WeightRenaming(r"output\.dense\.", r"feed_forward.down_proj."),
    WeightRenaming(r"output\.LayerNorm\.", r"feed_forward_norm."),
]
"""Names in BERT-like encoders, reference layout -> `hf_ctxmodels.architectures.transformer_encoder`."""


_REPLACED = {"base_layer", "modules_to_save", "original_module", "parametrizations"}  # in names of what wraps a map


def is_quantized(model: nn.Module) -> bool:
    """Whether a model is quantized by this package (a module sets `has_quantized_weights`) or by another one."""
    holds_codes = any(getattr(module, "has_quantized_weights", False) for module in model.modules())
    return holds_codes or bool(getattr(model, "is_quantized", False))


def check_savable(model: nn.Module) -> None:
    """Raise CtxError if a file cannot hold the weights, as after `quantize_dynamic`."""
    if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
        raise CtxError(
            "The weights of this quantized model are packed for the machine it runs on, and cannot be saved.",
            hint="save the model before it is quantized, or quantize by torchao or bitsandbytes.",
        )


def check_exportable(model: nn.Module) -> None:
    """Raise CtxError if the weights are not the model's own: quantized, sharded, or beside an adapter."""
    for name, value in model.state_dict().items():
        own = type(value) in (Tensor, nn.Parameter) and (value.is_floating_point() or value.dtype is torch.long)
        if not own or not _REPLACED.isdisjoint(name.split(".")):
            raise CtxError(
                f"The reference layout holds plain weights, and {name} is none.",
                hint="merge an adapter (merge_and_unload), gather a sharded model, export before quantizing.",
            )


def decoder_bias(prefix: str) -> WeightConverter:
    """The bias of a masked-LM decoder, which has two names in the reference; files of tied models may have only one."""
    return WeightConverter([f"{prefix}.decoder.bias", f"{prefix}.bias"], "mlm_head.decoder.bias", [FirstAvailable()])


def fused_projections(attention: str, names: Sequence[str] = ("query", "key", "value")) -> list[WeightConverter]:
    """Three matrices of queries, keys and values in the reference -> one here; `attention` is their prefix there, and
    `names` follow it."""
    return [
        WeightConverter(
            [f"{attention}.{part}.{kind}" for part in names],
            f"attention.qkv_proj.{kind}",
            [Concatenate(dim=0)],
        )
        for kind in ("weight", "bias")
    ]


def decoder_layers() -> list[WeightTransform]:
    """The layers of GPT and GPT-2 in the reference, which keeps the weights of linear maps as (in, out) -> the native
    layout."""
    maps = {
        "attn.c_attn": "attention.qkv_proj",
        "attn.c_proj": "attention.out_proj",
        "mlp.c_fc": "feed_forward.up_proj",
        "mlp.c_proj": "feed_forward.down_proj",
    }
    return [
        WeightRenaming(r"h\.", r"layers."),
        WeightRenaming(r"ln_1\.", r"attention_norm."),
        WeightRenaming(r"ln_2\.", r"feed_forward_norm."),
        *(WeightConverter(f"{old}.weight", f"{new}.weight", [Transpose()]) for old, new in maps.items()),
        *(WeightRenaming(f"{old}.bias", f"{new}.bias") for old, new in maps.items()),
    ]


class GPTConversions(NamedTuple):
    """Tables of GPT and GPT-2, whose heads in the reference have several names for what is `classifier` here.

    Attributes:
        sequence: Of the head for sequences; invertible.
        choice: Of the head for choices; invertible.
        conversion: Reads all heads.
    """

    sequence: list[WeightTransform]
    choice: list[WeightTransform]
    conversion: list[WeightTransform]

    @classmethod
    def of(cls, export: list[WeightTransform]) -> Self:
        """The tables of the heads from that of all other weights."""
        score = WeightRenaming(r"^score\.", r"classifier.")
        summary = WeightRenaming(r"^multiple_choice_head\.summary\.", r"classifier.")
        return cls([score, *export], [summary, *export], [summary, score, *export])


class RearrangeHeads(ConversionOps):
    """Rearranges every tensor separately, under its own name or the only target's.

    Args:
        load, save: Inverse functions of a tensor and the number of attention heads.
    """

    def __init__(self, load: Callable[[Tensor, int], Tensor], save: Callable[[Tensor, int], Tensor]) -> None:
        self.load, self.save = load, save

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        config: PreTrainedConfig,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Rearrange each tensor; several keep their names for a following operation."""
        heads = config.num_attention_heads
        tensors = {name: self.load(single_tensor(found), heads) for name, found in input_dict.items()}
        if len(tensors) == 1 and len(target_patterns) == 1:
            return dict.fromkeys(target_patterns, next(iter(tensors.values())))
        return tensors

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse."""
        return RearrangeHeads(self.save, self.load)


class MergeOutputHeads(RearrangeHeads):
    """(in, heads, head_dim) -> (heads * head_dim, in), the weight of a linear map."""

    def __init__(self) -> None:
        super().__init__(
            lambda tensor, heads: tensor.flatten(1).T.contiguous(),
            lambda tensor, heads: tensor.T.unflatten(1, (heads, -1)).contiguous(),
        )


class MergeInputHeads(RearrangeHeads):
    """(out, heads, head_dim) -> (out, heads * head_dim), the weight of a linear map."""

    def __init__(self) -> None:
        super().__init__(
            lambda tensor, heads: tensor.flatten(1), lambda tensor, heads: tensor.unflatten(1, (heads, -1))
        )


def single_tensor(found: Any) -> Tensor:
    """The tensor that a conversion is given for a name, alone or in a list."""
    return found[0] if isinstance(found, list) else found
