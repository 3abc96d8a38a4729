"""The base configuration of Transformer encoder-decoders."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxSeq2SeqConfig(CtxTransformerConfig):
    """Shape and regularisation of a Transformer encoder and decoder of one width (Vaswani et al. 2017).

    Fields without "decoder" are those of the encoder, and of both where there is no other. The defaults are
    BART-large's.

    Args: those of `CtxTransformerConfig`, and
        vocab_size: Number of tokens of the tokenizer, of sources and of targets.
        hidden_size: Width of the residual stream.
        num_hidden_layers, decoder_layers: Number of layers.
        num_attention_heads, decoder_attention_heads: Attention heads per layer, which divide `hidden_size`.
        intermediate_size, decoder_ffn_dim: Width of the feed-forward layer.
        hidden_act: Activation of the feed-forward layer.
        hidden_dropout_prob: Dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: Dropout on attention probabilities.
        classifier_dropout: Dropout before the task heads; None for `hidden_dropout_prob`.
        max_position_embeddings: Longest source and longest target, in tokens.
        initializer_range: Standard deviation of the normal initialisation.
        layer_norm_eps: Epsilon of every norm.
        decoder_start_token_id: Id of the token before a target's first.
        tie_word_embeddings: Share the output layer with the encoder's word embeddings.
        share_word_embeddings: Share the decoder's word embeddings with the encoder's; None for `tie_word_embeddings`.
    """

    vocab_size: int = 50265
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    decoder_layers: int = 12
    num_attention_heads: int = 16
    decoder_attention_heads: int = 16
    intermediate_size: int = 4096
    decoder_ffn_dim: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 1024
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    share_word_embeddings: bool | None = None

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "share_word_embeddings",
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.share_word_embeddings is None:  # settled now: adapters may untie the output layer later
            self.share_word_embeddings = self.tie_word_embeddings

    def validate_decoder(self) -> None:
        """Check that there are layers, and that the heads divide the width (called at construction)."""
        self.require_positive("num_hidden_layers", "decoder_layers", "decoder_attention_heads")
        if self.hidden_size % self.decoder_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"decoder_attention_heads={self.decoder_attention_heads}; choose a number of heads that divides it."
            )

    @property
    def target_vocab_size(self) -> int:
        """Number of tokens of targets."""
        return self.vocab_size

    @property
    def shares_word_embeddings(self) -> bool:
        """Whether encoder and decoder have one table of word embeddings."""
        return bool(self.share_word_embeddings)


def seq2seq_size(width: int, layers: int, heads: int) -> dict[str, int]:
    """Configuration fields of an encoder and a decoder of one shape, with feed-forward layers of four times the hidden
    size."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "decoder_layers": layers,
        "num_attention_heads": heads,
        "decoder_attention_heads": heads,
        "intermediate_size": 4 * width,
        "decoder_ffn_dim": 4 * width,
    }
