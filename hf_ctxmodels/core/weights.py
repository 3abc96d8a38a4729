"""What the families' conversion tables are made of: parts they share, and conversions transformers does not ship."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming

# Names of the first releases; read, never written.
LEGACY_NORM_NAMES = [
    WeightRenaming(r"LayerNorm\.gamma", r"LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta", r"LayerNorm.bias"),
]


class FirstFound(ConversionOps):
    """Several reference names of one parameter: the first that a file holds is read; all are written."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Keep the tensor of the first source that is there."""
        found = next(input_dict[source] for source in source_patterns if source in input_dict)
        return {target_patterns[0]: _single(found)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Write the tensor under every name."""
        return _Repeated()


class _Repeated(ConversionOps):
    """One tensor under several names."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Copy the tensor for every target: safetensors refuses shared memory."""
        (found,) = input_dict.values()
        return {target: _single(found).clone() for target in target_patterns}

    @property
    def reverse_op(self) -> ConversionOps:
        """Read the first."""
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
"""Names in the encoder of BERT's heirs, reference layout -> `hf_ctxmodels.models._shared.transformer_encoder`."""


def fused_projections(attention: str) -> list[WeightConverter]:
    """Queries, keys and values, three matrices there -> one here.

    Args:
        attention: Where the three stand in the reference's names.
    """
    return [
        WeightConverter(
            [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")],
            f"attention.qkv_proj.{kind}",
            [Concatenate(dim=0)],
        )
        for kind in ("weight", "bias")
    ]


class _EachTensor(ConversionOps):
    """Rearranges every tensor by itself, under its own name or the only target's."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """One tensor, given the configuration's number of heads."""
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
        """Rearrange each; several keep their names for the operation that joins or parted them."""
        heads = config.num_attention_heads
        tensors = {name: self.rearrange(_single(found), heads) for name, found in input_dict.items()}
        if len(tensors) == 1 and len(target_patterns) == 1:
            return dict.fromkeys(target_patterns, next(iter(tensors.values())))
        return tensors


class MergeOutputHeads(_EachTensor):
    """(in, heads, head_dim) -> (heads * head_dim, in): a projection to heads as the weight of a linear map."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Flatten and transpose."""
        return tensor.flatten(1).T.contiguous()

    @property
    def reverse_op(self) -> ConversionOps:
        """Split the output into heads again."""
        return _SplitOutputs()


class MergeInputHeads(_EachTensor):
    """(out, heads, head_dim) -> (out, heads * head_dim): a projection from heads as the weight of a linear map."""

    def rearrange(self, tensor: Tensor, heads: int) -> Tensor:
        """Flatten."""
        return tensor.flatten(1)

    @property
    def reverse_op(self) -> ConversionOps:
        """Split the input into heads again."""
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
