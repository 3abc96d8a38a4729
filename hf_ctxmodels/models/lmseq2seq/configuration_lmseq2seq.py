"""Configuration of the translator made of two language models (Ramachandran et al. 2016, arXiv 1611.02683)."""

import copy
from dataclasses import field
from typing import Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_lstm_language_model import CtxLSTMLanguageModelConfig

PARTS = ("embeddings", "layers", "softmax")


@strict
class CtxLmSeq2SeqConfig(CtxLSTMLanguageModelConfig):
    """Shape of encoder and decoder, and what of them is a language model's.

    Args:
        vocab_size, target_vocab_size: Number of words of the source and of the target language.
        embedding_size: Width of a word's vector, in both.
        hidden_size: Width of a layer's cell and output, in both.
        num_hidden_layers: LSTM layers of the encoder, and of the decoder.
        pretrained_layers: The first of them that are the language models' (the paper's have one).
        residual: The softmax reads the output of the decoder's pretrained layers too (section 2.3).
        multi_layer_attention: The decoder attends to the encoder's pretrained layers beside the top (section 2.3).
        source_model, target_model: Directories or Hub ids of language models of the two languages, whose weights
            `load_pretrained_parts` copies into a new translator; they are saved with it. None for random weights.
        taken_parts: The parts that are copied: some of "embeddings", "layers" and "softmax" (section 4's ablations).
        hidden_dropout_prob: Dropout of the words' vectors, between layers, and of what the softmax reads.
        initializer_range: Embeddings are drawn uniformly from -this to this.
        pad_token_id: Padding, in both vocabularies.
        decoder_start_token_id, eos_token_id: Of the target language.
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
    taken_parts: list[str] = field(default_factory=lambda: list(PARTS))
    hidden_dropout_prob: float | int = 0.2
    pad_token_id: int | None = 0
    decoder_start_token_id: int | None = 2
    eos_token_id: int | None = 2
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        sizes = ("vocab_size", "target_vocab_size", "embedding_size", "hidden_size", "num_hidden_layers")
        self.require_positive(*sizes, "pretrained_layers")
        if self.pretrained_layers > self.num_hidden_layers:
            raise ValueError(
                f"pretrained_layers={self.pretrained_layers} of num_hidden_layers={self.num_hidden_layers}."
            )
        if unknown := set(self.taken_parts) - set(PARTS):
            raise ValueError(f"taken_parts has {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}.")

    @property
    def layer_sizes(self) -> list[int]:
        """Width of the input of every layer, and of the last one's output."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]

    @property
    def memory_size(self) -> int:
        """Width of what the decoder's attention sums up."""
        return self.hidden_size * (2 if self.multi_layer_attention else 1)

    def decoder_config(self) -> Self:
        """The configuration of the decoder's layers: the same, with the words of the target language."""
        config = copy.deepcopy(self)
        config.vocab_size = self.target_vocab_size
        return config
