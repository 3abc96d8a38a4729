"""SpanBERT configuration (Joshi et al. 2020, section 4.2, and the released pretraining code)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig


@strict
class CtxSpanBertConfig(CtxBertConfig):
    """Configuration of SpanBERT; the defaults are SpanBERT-base, cased. See `CtxBertConfig` for the other arguments.

    Args:
        max_pair_targets: Maximum number of tokens, from the start of a span, that the span boundary head predicts: its
            number of position embeddings.
        pair_position_size: Width of these position embeddings.
    """

    model_type = "ctx-spanbert"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert",)
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxBertConfig.non_reference_fields,
        "max_pair_targets",
        "pair_position_size",
    )

    vocab_size: int = 28996
    max_pair_targets: int = 15
    pair_position_size: int = 200

    def validate_architecture(self) -> None:
        """Check the sizes of the span boundary head (called at construction)."""
        super().validate_architecture()
        self.require_positive("max_pair_targets", "pair_position_size")
