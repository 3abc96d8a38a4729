"""UniLM configuration (Dong et al. 2019, section 2.1 and 2.4; the released code)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxQueryGenerationConfig
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

# values of `token_type_ids`: the segments of a pair, a left-to-right or right-to-left text, source and target
FIRST, SECOND, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SOURCE, TARGET = range(NUM_SEGMENTS := 6)


@strict
class CtxUniLMConfig(CtxQueryGenerationConfig, CtxBertConfig):
    """Configuration of UniLM; the defaults are the base model with BERT's cased vocabulary.

    See `CtxBertConfig` and `CtxQueryGenerationConfig` for the arguments. There are 6 segments: 0 and 1 for a pair, 2
    for a left-to-right text, 3 for a right-to-left text, 4 for a source sequence, 5 for its target sequence.
    """

    model_type = "ctx-unilm"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert",)

    vocab_size: int = 28996
    type_vocab_size: int = NUM_SEGMENTS
    decoder_start_token_id: int | None = 101
    eos_token_id: int | list[int] | None = 102
    query_token_id: int | None = 103

    copied_segments: ClassVar[tuple[int, ...]] = (FIRST, FIRST, FIRST, SECOND)

    def validate_segments(self) -> None:
        """Check the number of segments (called at construction)."""
        if self.type_vocab_size != NUM_SEGMENTS:
            raise ValueError(f"type_vocab_size={self.type_vocab_size}, but UniLM has {NUM_SEGMENTS} segments.")
