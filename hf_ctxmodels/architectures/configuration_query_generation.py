"""The configuration of encoders that write a target after a source, in one stack of layers."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig

PAIR_SEGMENTS = 2
"""Segments of BERT."""
GENERATION_TOKEN_FIELDS = ("query_token_id", "decoder_start_token_id", "eos_token_id")
"""Fields that BERT's configuration lacks, by which a head writes."""


@strict
class CtxQueryGenerationConfig(CtxEncoderConfig):
    """Shape of an encoder whose head `QueryForConditionalGeneration` writes. A BERT configuration, with the segments of
    a pair, opens as one with all of the family's.

    Args: those of `CtxEncoderConfig`, and
        query_token_id: The token whose state predicts a token of the target: a mask token, or one of its own.
        decoder_start_token_id: First of `decoder_input_ids`.
        eos_token_id: Last token of a target.
        label_smoothing: Share of a target's probability that the training loss of the writing head spreads over the
            vocabulary (Szegedy et al. 2016, section 7).
        span_loss_weight: Weight of the loss of whole spans where they are given, in [0, 1]; that of single tokens has
            the rest.
    """

    query_token_id: int | None = None
    decoder_start_token_id: int | None = None
    label_smoothing: float | int = 0.0
    span_loss_weight: float | int = 0.5
    is_encoder_decoder: bool = True

    copied_segments: ClassVar[tuple[int, ...]]
    """BERT's segments, of which the embeddings of those after them begin as copies."""

    feeds_start_token: ClassVar[bool] = False
    """Whether the first of `decoder_input_ids` is read, as a token of the target; else it only holds the place."""

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxEncoderConfig.non_reference_fields,
        *GENERATION_TOKEN_FIELDS,
        *("label_smoothing", "span_loss_weight", "is_encoder_decoder", "type_vocab_size"),
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.is_encoder_decoder = True  # what a reference checkpoint says is of its own heads

    def validate_shares(self) -> None:
        """Check the weights of the writing head's loss (called at construction)."""
        for name in ("label_smoothing", "span_loss_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share, and must be between 0 and 1.")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers; a BERT checkpoint, with segments of a pair only, is given all."""
        fields, unused = super().get_config_dict(*args, **kwargs)
        if fields.get("type_vocab_size") == PAIR_SEGMENTS:
            fields = {**fields, "type_vocab_size": PAIR_SEGMENTS + len(cls.copied_segments)}
        return fields, unused

    @property
    def max_source_target_length(self) -> int:
        """Most tokens of a source and of its target, the end included: both have positions in one row."""
        return self.max_position_embeddings - int(self.feeds_start_token)

    @property
    def target_vocab_size(self) -> int:
        """Size of the target's vocabulary, the source's."""
        return self.vocab_size
