"""What the families' conversion tables are made of: parts they share, and conversions transformers does not ship."""

from typing import Any

from torch import Tensor
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
        return {target_patterns[0]: found[0] if isinstance(found, list) else found}

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
        tensor = found[0] if isinstance(found, list) else found
        return {target: tensor.clone() for target in target_patterns}

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
"""Names in the encoder of BERT's heirs, reference layout -> `hf_ctxmodels.encoder`."""


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
