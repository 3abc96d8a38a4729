"""ERNIE-GEN configuration (Xiao et al. 2020, section 4.1; the released code)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxQueryGenerationConfig
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

TARGET_SEGMENT = 3


@strict
class CtxErnieGenConfig(CtxQueryGenerationConfig, CtxBertConfig):
    """Configuration of ERNIE-GEN; the defaults are the base model with BERT's uncased vocabulary.

    See `CtxBertConfig` and `CtxQueryGenerationConfig` for the arguments. The source has segments 0 to 2, the target 3.
    """

    model_type = "ctx-ernie-gen"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert",)

    type_vocab_size: int = TARGET_SEGMENT + 1
    decoder_start_token_id: int | None = 101
    eos_token_id: int | list[int] | None = 102
    query_token_id: int | None = 103

    copied_segments: ClassVar[tuple[int, ...]] = (0, 1)
    feeds_start_token: ClassVar[bool] = True

    def validate_segments(self) -> None:
        """Check the number of segments (called at construction)."""
        if self.type_vocab_size <= TARGET_SEGMENT:
            raise ValueError(
                f"type_vocab_size={self.type_vocab_size}, but the target has segment {TARGET_SEGMENT}; use "
                f"{TARGET_SEGMENT + 1} or more."
            )
