"""LASER configuration (Artetxe & Schwenk 2019, arXiv 1812.10464, section 3)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxLaserConfig(CtxConfig):
    """Shape of the encoder of all languages, and of the decoder that it learns with.

    Args:
        vocab_size: Subwords of all languages.
        target_vocab_size: Subwords that the decoder writes: the same.
        num_languages: Languages that the decoder writes.
        embedding_size: Width of a subword, in the encoder and in the decoder.
        hidden_size: Width of a subword's state and of a sentence's vector: that of both directions together.
        num_hidden_layers: LSTM layers of the encoder.
        pooling: What stands for a sentence: the largest value ("max") or the "mean" of its subwords' states.
        language_size: Width of a language's embedding.
        decoder_size: Width of the decoder's states.
        num_decoder_layers: LSTM layers of the decoder.
        hidden_dropout_prob: Dropout on what LSTM layers read, and before the prediction.
        classifier_dropout: Dropout before a task head.
        initializer_range: Standard deviation of the initialisation of embeddings and of what stands on the LSTMs.
        pad_token_id: Padding.
        decoder_start_token_id, eos_token_id: What a target begins and ends with.
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

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")
        sizes = ("vocab_size", "target_vocab_size", "num_languages", "embedding_size", "num_hidden_layers")
        for name in (*sizes, "language_size", "decoder_size", "num_decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every hidden state: the embeddings, and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
