"""RoBERTa configuration (Liu et al. 2019, sections 2 and 3, and the released models)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig


@strict
class CtxRobertaConfig(CtxBertConfig):
    """Configuration of RoBERTa; the defaults are RoBERTa-base. See `CtxBertConfig` for the other arguments.

    Args:
        max_position_embeddings: Number of position embeddings, of which tokens do not use the first `pad_token_id + 1`:
            the maximum sequence length is 512 tokens.
        type_vocab_size: Number of segments, 1: only separators distinguish the texts of a pair.
        pad_token_id: Id of the padding token, and position of padding.
    """

    model_type = "ctx-roberta"
    reference_model_types: ClassVar[tuple[str, ...]] = ("roberta",)

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2

    def validate_architecture(self) -> None:
        """Check the number of positions (called at construction)."""
        super().validate_architecture()
        if self.max_position_embeddings <= self.first_position:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} must be above pad_token_id + 1 = "
                f"{self.first_position}, the position of the first token."
            )

    def validate_pooler(self) -> None:
        """Check that the pooler has a hyperbolic tangent (called at construction)."""
        if self.pooler_act != "tanh":
            raise ValueError(f"pooler_act={self.pooler_act!r}: RoBERTa's pooler has the activation tanh.")

    @property
    def first_position(self) -> int:
        """Position of the first token of a sequence."""
        return self.pad_token_id + 1
