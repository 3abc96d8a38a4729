"""Configuration of an encoder-decoder from two language models (Ramachandran et al. 2016, arXiv 1611.02683)."""

import copy
from dataclasses import field
from typing import Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig

PRETRAINED_PARTS = ("embeddings", "layers", "softmax")


@strict
class CtxLmSeq2SeqConfig(CtxLSTMLanguageModelConfig):
    """Shape of encoder and decoder, and their pretrained parts.

    See `CtxLSTMLanguageModelConfig` for the other arguments.

    Args:
        vocab_size, target_vocab_size: Sizes of the source and the target vocabulary.
        embedding_size, hidden_size: Widths of the embeddings and of the layers.
        num_hidden_layers: Number of LSTM layers of the encoder, and of the decoder.
        pretrained_layers: Number of lower layers that are initialized with the language models (one in the paper).
        residual: Residual connection around the decoder's upper layers (section 2.3).
        multi_layer_attention: Whether the decoder attends to the encoder's last pretrained layer in addition to the top
            layer (section 2.3).
        source_model, target_model: Directories or Hub ids of language models of both languages, whose weights
            `load_pretrained_components` copies into a new model, which saves them. None for random weights.
        pretrained_parts: The parts to copy: any of "embeddings", "layers" and "softmax" (ablations of section 4).
        hidden_dropout_prob: Dropout of the embeddings, between layers and of the softmax's input.
        decoder_start_token_id, eos_token_id: Ids in the target vocabulary.
    """

    model_type = "ctx-lmseq2seq"

    vocab_size: int = 30_000
    target_vocab_size: int = 30_000
    embedding_size: int = 512
    hidden_size: int = 1024
    num_hidden_layers: int = 3
    pretrained_layers: int = 1
    residual: bool = True
    multi_layer_attention: bool = True
    source_model: str | None = None
    target_model: str | None = None
    pretrained_parts: list[str] = field(default_factory=lambda: list(PRETRAINED_PARTS))
    hidden_dropout_prob: float | int = 0.2
    pad_token_id: int | None = 0
    decoder_start_token_id: int | None = 2
    eos_token_id: int | None = 2
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False

    def validate_shape(self) -> None:
        """Check shape and parts (called at construction)."""
        self.require_positive("vocab_size", "target_vocab_size", "embedding_size", "hidden_size")
        self.require_positive("num_hidden_layers", "pretrained_layers")
        if self.pretrained_layers > self.num_hidden_layers:
            raise ValueError(
                f"pretrained_layers={self.pretrained_layers} exceeds num_hidden_layers={self.num_hidden_layers}."
            )
        if unknown := set(self.pretrained_parts) - set(PRETRAINED_PARTS):
            raise ValueError(
                f"pretrained_parts has {', '.join(sorted(unknown))}, expected any of {', '.join(PRETRAINED_PARTS)}."
            )

    @property
    def memory_size(self) -> int:
        """Width of the values in the decoder's attention."""
        return self.hidden_size * (2 if self.multi_layer_attention else 1)

    def decoder_config(self) -> Self:
        """Configuration of the decoder's layers, with the target vocabulary."""
        config = copy.deepcopy(self)
        config.vocab_size = self.target_vocab_size
        return config
