"""The base configuration of BERT-like encoders."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxEncoderConfig(CtxTransformerConfig):
    """Shape and regularisation of a Transformer encoder with absolute positions; the defaults are BERT-base.

    Args: those of `CtxTransformerConfig`, and
        vocab_size: Number of tokens of the tokenizer.
        hidden_size: Width of the residual stream; a multiple of `num_attention_heads`.
        num_hidden_layers: Number of Transformer layers.
        num_attention_heads: Attention heads per layer.
        intermediate_size: Width of the feed-forward layer.
        hidden_act: Activation of the feed-forward layer and of the pretraining heads' dense layer.
        hidden_dropout_prob: Dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: Dropout on attention probabilities.
        max_position_embeddings: Longest sequence, in tokens.
        type_vocab_size: Number of segments (sentence A, sentence B); 0 for no segment embeddings (DistilBERT).
        initializer_range: Standard deviation of the normal initialisation.
        layer_norm_eps: Epsilon of every LayerNorm.
        pad_token_id: Id of the padding token; its embedding starts at zero.
        tie_word_embeddings: Share the masked-LM decoder with the word embeddings.
        answer_steps: Steps of a stochastic answer network in place of the linear classifier of pairs (see
            `heads.answer_network`); 0 for none. It needs two segments.
        answer_dropout: Rate at which training leaves steps of the answer network out of their average.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    answer_steps: int = 0
    answer_dropout: float | int = 0.1

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "answer_steps",
        "answer_dropout",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }

    def validate_architecture(self) -> None:
        """Check that the answer network has two segments to compare (called at construction)."""
        super().validate_architecture()
        if self.answer_steps < 0 or (self.answer_steps and self.type_vocab_size < 2):
            raise ValueError(
                f"answer_steps={self.answer_steps} with type_vocab_size={self.type_vocab_size}: an answer network "
                "compares two segments in one step or more; use 0 for a linear classifier."
            )
