"""Shared parts of the families' weight conversions, and conversion operations that transformers lacks."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming

# names of the first releases, for loading only
LEGACY_NORM_NAMES = [
    WeightRenaming(r"LayerNorm\.gamma", r"LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta", r"LayerNorm.bias"),
]


class FirstFound(ConversionOps):
    """Several reference names of one parameter: the first one in a file is loaded; all are saved."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The tensor of the first source in the file."""
        found = next(input_dict[source] for source in source_patterns if source in input_dict)
        return {target_patterns[0]: _single(found)}

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
        return {target: _single(found).clone() for target in target_patterns}

    @property
    def reverse_op(self) -> ConversionOps:
        """Load the first."""
        return FirstFound()


POST_NORM_RENAMINGS = [
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"encoder\.layer\.", r"layers."),
    WeightRenaming(r"attention\.output\.dense\.", r"attention.out_proj."),
    WeightRenaming(r"attention\.output\.LayerNorm\.", r"attention_norm."),
    WeightRenaming(r"intermediate\.dense\.", r"feed_forward.up_proj."),
    WeightRenaming(r"output\.dense\.", r"feed_forward.down_proj."),
    WeightRenaming(r"output\.LayerNorm\.", r"feed_forward_norm."),
]
"""Names in BERT-like encoders, reference layout -> `hf_ctxmodels.models._shared.transformer_encoder`."""


def fused_projections(attention: str) -> list[WeightConverter]:
    """Three matrices of queries, keys and values in the reference -> one here; `attention` is their prefix there."""
    return [
        WeightConverter(
            [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")],
            f"attention.qkv_proj.{kind}",
            [Concatenate(dim=0)],
        )
        for kind in ("weight", "bias")
    ]


class _EachTensor(ConversionOps):
    """Rearranges every tensor separately, under its own name or the only target's."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Rearrange a tensor, given the number of attention heads."""
        raise NotImplementedError

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
        tensors = {name: self.rearrange(_single(found), heads) for name, found in input_dict.items()}
        if len(tensors) == 1 and len(target_patterns) == 1:
            return dict.fromkeys(target_patterns, next(iter(tensors.values())))
        return tensors


class MergeOutputHeads(_EachTensor):
    """(in, heads, head_dim) -> (heads * head_dim, in), the weight of a linear map."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Flatten and transpose."""
        return tensor.flatten(1).T.contiguous()

    @property
    def reverse_op(self) -> ConversionOps:
        """Split the output into heads."""
        return _SplitOutputs()


class MergeInputHeads(_EachTensor):
    """(out, heads, head_dim) -> (out, heads * head_dim), the weight of a linear map."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Flatten."""
        return tensor.flatten(1)

    @property
    def reverse_op(self) -> ConversionOps:
        """Split the input into heads."""
        return _SplitInputs()


class _SplitOutputs(_EachTensor):
    """(heads * head_dim, in) -> (in, heads, head_dim)."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Transpose and split."""
        return tensor.T.unflatten(1, (heads, -1)).contiguous()

    @property
    def reverse_op(self) -> ConversionOps:
        """Flatten again."""
        return MergeOutputHeads()


class _SplitInputs(_EachTensor):
    """(out, heads * head_dim) -> (out, heads, head_dim)."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Split."""
        return tensor.unflatten(1, (heads, -1))

    @property
    def reverse_op(self) -> ConversionOps:
        """Flatten again."""
        return MergeInputHeads()


def _single(found: Any) -> Tensor:
    return found[0] if isinstance(found, list) else found
