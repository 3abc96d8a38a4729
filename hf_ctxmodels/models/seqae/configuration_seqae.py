"""Configuration of the sequence auto-encoder (Dai & Le 2015, arXiv 1511.01432, sections 2 to 4)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_lstm_language_model import CtxLSTMLanguageModelConfig


@strict
class CtxSeqaeConfig(CtxLSTMLanguageModelConfig):
    """Shape and regularisation of the LSTM; the defaults are those of the paper, section 4.

    Args:
        vocab_size: Number of words.
        embedding_size: Width of a word's vector.
        hidden_size: Width of the LSTM's cell and output.
        num_hidden_layers: LSTM layers.
        word_dropout_prob: Share of words that are missing from what is read, each place by itself.
        embedding_dropout_prob: Dropout of the words' vectors.
        hidden_dropout_prob: Dropout between layers, and of what the softmax reads.
        stateful: Return `past_key_values`, with which the next batch may continue, unless `use_cache=False` is given.
        bptt: Steps through which a classifier's gradient goes back; the text before is read all the same.
        classifier_pooling: What a classifier of texts reads: None for the last word's state (the paper's), "mean" for
            the mean of all.
        label_gain: Where a classifier of texts has its target in training: "last", behind the last word; or "linear",
            behind every word, with weights that rise from 0 at the first to 1 at the last (section 3, linear gain).
        classifier_dropout: Dropout of what a task head reads.
        initializer_range: Embeddings are drawn uniformly from -this to this.
        pad_token_id, eos_token_id: Ids of padding and of the token that ends a text.
    """

    model_type = "ctx-seqae"

    vocab_size: int = 30_000
    embedding_size: int = 512
    hidden_size: int = 1024
    num_hidden_layers: int = 1
    word_dropout_prob: float | int = 0.0
    embedding_dropout_prob: float | int = 0.0
    hidden_dropout_prob: float | int = 0.0
    bptt: int = 400
    classifier_pooling: Literal["mean"] | None = None
    label_gain: Literal["last", "linear"] = "last"
    classifier_dropout: float | int = 0.0
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        self.require_positive("vocab_size", "embedding_size", "hidden_size", "num_hidden_layers", "bptt")
        for name in ("word_dropout_prob", "embedding_dropout_prob", "hidden_dropout_prob", "classifier_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected 0 or more, below 1.")
        if self.label_gain == "linear" and self.classifier_pooling is not None:
            raise ValueError(
                f"label_gain='linear' needs every word's state, not classifier_pooling={self.classifier_pooling!r}."
            )
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=True: the softmax reads the LSTM's output, which is no word's vector."
            )

    @property
    def layer_sizes(self) -> list[int]:
        """Width of the input of every layer, and of the last one's output."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
