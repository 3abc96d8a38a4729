"""Weight conversions shared by several families, and conversion operations that transformers lacks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

# parameter names of the first releases, for loading only
LEGACY_NORM_RENAMINGS = [
    WeightRenaming(r"LayerNorm\.gamma", r"LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta", r"LayerNorm.bias"),
]

_pending: dict[str, list[WeightTransform]] = {}


def register_conversion(model_type: str, conversion: list[WeightTransform]) -> None:
    """Register a family's conversion with transformers when the first model is created: registration makes transformers
    build the conversions of all its models, a fifth of this package's import time."""
    _pending[model_type] = conversion


def register_pending_conversions() -> None:
    """Register all deferred conversions; called at every model's construction."""
    while _pending:
        register_checkpoint_conversion_mapping(*_pending.popitem())


class FirstAvailable(ConversionOps):
    """One parameter with several names in the reference: the first available is loaded, and all are saved."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the tensor of the first source pattern that is in the file."""
        tensor = next(input_dict[source] for source in source_patterns if source in input_dict)
        return {target_patterns[0]: single_tensor(tensor)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Save the tensor under every name."""
        return _Repeat()


class _Repeat(ConversionOps):
    """One tensor under several names."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """A copy for every target, since safetensors rejects shared memory."""
        (tensor,) = input_dict.values()
        return {target: single_tensor(tensor).clone() for target in target_patterns}

    @property
    def reverse_op(self) -> ConversionOps:
        """Load the tensor of the first name."""
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
"""Parameter names of BERT-like encoders: transformers -> `hf_ctxmodels.architectures.transformer_encoder`."""


_WRAPPER_NAMES = {"base_layer", "modules_to_save", "original_module", "parametrizations"}  # modules that wrap a layer


def is_quantized(model: nn.Module) -> bool:
    """Whether a model is quantized, by this package (a module sets `has_quantized_weights`) or by another one."""
    has_codes = any(getattr(module, "has_quantized_weights", False) for module in model.modules())
    return has_codes or bool(getattr(model, "is_quantized", False))


def require_resizable(embeddings: nn.Module) -> None:
    """Raise CtxError if embeddings or an output layer are quantized or low-rank, so that their vocabulary cannot be
    resized."""
    for attribute, kind in (("has_quantized_weights", "Quantized"), ("has_low_rank_weights", "Low-rank")):
        if getattr(embeddings, attribute, False):
            raise CtxError(
                f"{kind} embeddings cannot be resized.",
                location="resize_token_embeddings",
                hint="resize the original model, and compress it afterwards.",
            )


def require_loaded(weight: Tensor, states: Tensor, description: str, *, hint: str) -> None:
    """Raise CtxError if accelerate offloads a weight that is read outside the forward of its module.

    Accelerate loads the weights of a module for its forward only; otherwise they are on the meta device, and products
    with them are undefined.

    Args:
        weight: The weight.
        states: Hidden states of any shape that are multiplied with it.
        description: The subject of the error.
        hint: What to do instead.
    """
    if weight.is_meta and not states.is_meta:
        raise CtxError(f"{description} cannot be offloaded.", hint=hint)


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_savable(model: nn.Module) -> None:
    """Raise CtxError if the weights cannot be saved, as after `quantize_dynamic`."""
    if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
        raise CtxError(
            "The weights of this quantized model are packed for this machine's processor, and cannot be saved.",
            hint="save the model before quantizing it, or quantize it with torchao or bitsandbytes.",
        )


def check_exportable(model: nn.Module) -> None:
    """Raise CtxError unless all weights are plain tensors: not quantized, sharded or wrapped by an adapter."""
    for name, value in model.state_dict().items():
        is_plain = type(value) in (Tensor, nn.Parameter) and (value.is_floating_point() or value.dtype is torch.long)
        if not is_plain or not _WRAPPER_NAMES.isdisjoint(name.split(".")):
            raise CtxError(
                f"Only plain weights can be exported, and {name} is not plain.",
                hint="merge an adapter (merge_and_unload), gather a sharded model, export before quantizing.",
            )


def decoder_bias(prefix: str) -> WeightConverter:
    """The bias of a masked-LM decoder, which has two names in transformers; files of tied models may have only one."""
    return WeightConverter([f"{prefix}.decoder.bias", f"{prefix}.bias"], "mlm_head.decoder.bias", [FirstAvailable()])


def fused_projections(
    attention: str,
    names: Sequence[str] = ("query", "key", "value"),
    fused: str = "attention.qkv_proj",
    *,
    parameters: Sequence[str] = ("weight", "bias"),
) -> list[WeightConverter]:
    """Conversion of separate projections with a common prefix (query, key and value) to one fused projection."""
    return [
        WeightConverter(
            [f"{attention}.{name}.{parameter}" for name in names], f"{fused}.{parameter}", [Concatenate(dim=0)]
        )
        for parameter in parameters
    ]


def gpt_conversions(renamings: list[WeightTransform]) -> tuple[list[WeightTransform], ...]:
    """Conversions of GPT and GPT-2, from the renamings of their weights outside of the layers.

    Linear layers have (in, out) weights in the reference, and `classifier` has a different name in each head: returns
    the conversion for export, for export of the sequence classification and of the multiple choice head, and to load.
    """
    linear_layers = {
        "attn.c_attn": "attention.qkv_proj",
        "attn.c_proj": "attention.out_proj",
        "mlp.c_fc": "feed_forward.up_proj",
        "mlp.c_proj": "feed_forward.down_proj",
    }
    export: list[WeightTransform] = [
        *renamings,
        WeightRenaming(r"h\.", r"layers."),
        WeightRenaming(r"ln_1\.", r"attention_norm."),
        WeightRenaming(r"ln_2\.", r"feed_forward_norm."),
        *(WeightConverter(f"{old}.weight", f"{new}.weight", [Transpose()]) for old, new in linear_layers.items()),
        *(WeightRenaming(f"{old}.bias", f"{new}.bias") for old, new in linear_layers.items()),
    ]
    score = WeightRenaming(r"^score\.", r"classifier.")
    summary = WeightRenaming(r"^multiple_choice_head\.summary\.", r"classifier.")
    return export, [score, *export], [summary, *export], [summary, score, *export]


class RearrangeHeads(ConversionOps):
    """Rearranges every tensor separately; a single tensor takes the target's name.

    `load` and `save` are inverse functions of a tensor and the number of attention heads.
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
        """Rearrange each tensor; several tensors keep their names for the next operation."""
        heads = config.num_attention_heads
        tensors = {name: self.load(single_tensor(tensor), heads) for name, tensor in input_dict.items()}
        if len(tensors) == 1 and len(target_patterns) == 1:
            return dict.fromkeys(target_patterns, next(iter(tensors.values())))
        return tensors

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse operation."""
        return RearrangeHeads(self.save, self.load)


def single_tensor(value: Any) -> Tensor:
    """A tensor, or the only tensor of a list."""
    return value[0] if isinstance(value, list) else value
