"""LASER configuration (Artetxe & Schwenk 2019, arXiv 1812.10464, section 3)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxLaserConfig(CtxConfig):
    """Shape of the multilingual encoder and the decoder. See `CtxConfig` for the other arguments.

    Args:
        vocab_size, target_vocab_size: Size of the joint vocabulary of all languages, for encoder and decoder.
        num_languages: Number of target languages.
        embedding_size: Width of the encoder's and the decoder's embeddings.
        hidden_size: Width of hidden states and of sentence embeddings, both directions concatenated.
        num_hidden_layers, num_decoder_layers: Number of LSTM layers of the encoder and of the decoder.
        pooling: Pooling of a sentence's hidden states.
        language_size, decoder_size: Widths of a language embedding and of the decoder's states.
        hidden_dropout_prob: Dropout on the input of LSTM layers, and before the output layer.
        initializer_range: Standard deviation of the initialization of embeddings and heads.
    """

    model_type = "ctx-laser"

    vocab_size: int = 50_000
    target_vocab_size: int = 50_000
    num_languages: int = 2
    embedding_size: int = 320
    hidden_size: int = 1024
    num_hidden_layers: int = 5
    pooling: Literal["max", "mean"] = "max"
    language_size: int = 32
    decoder_size: int = 2048
    num_decoder_layers: int = 1
    hidden_dropout_prob: float | int = 0.1
    classifier_dropout: float | int = 0.0
    initializer_range: float | int = 0.05
    pad_token_id: int | None = 1
    decoder_start_token_id: int | None = 0
    eos_token_id: int | None = 2
    is_encoder_decoder: bool = True

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size", "target_vocab_size")

    def validate_shape(self) -> None:
        """Check the shape (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("target_vocab_size", "num_languages", "language_size", "num_hidden_layers")
        self.require_positive("decoder_size", "num_decoder_layers")

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all hidden states: the embeddings and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
