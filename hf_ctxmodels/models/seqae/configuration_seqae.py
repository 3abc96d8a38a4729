"""Configuration of the sequence auto-encoder (Dai & Le 2015, arXiv 1511.01432, sections 2 to 4)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig


@strict
class CtxSeqaeConfig(CtxLSTMLanguageModelConfig):
    """Shape and regularization of the LSTM; the defaults follow section 4 of the paper.

    See `CtxLSTMLanguageModelConfig` for the other arguments.

    Args:
        embedding_size, hidden_size: Widths of the embeddings, and of the LSTM's cell and output.
        word_dropout_prob: Dropout of whole input words, independently at every position.
        embedding_dropout_prob: Dropout of the embeddings.
        hidden_dropout_prob: Dropout between layers and of the softmax's input.
        bptt: Number of steps of back-propagation in a classifier; longer texts are encoded completely.
        classifier_pooling: Input of a text classifier: None for the last word's state as in the paper, "mean" for the
            mean of all states.
        label_gain: Training predictions of a text classifier: "last" for the last word, or "linear" for all words with
            weights that increase linearly from 0 to 1 (section 3, linear gain).
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
        """Check the shape and the rates (called at construction)."""
        self.require_positive("vocab_size", "embedding_size", "hidden_size", "num_hidden_layers", "bptt")
        for name in ("word_dropout_prob", "embedding_dropout_prob", "hidden_dropout_prob", "classifier_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected 0 or more, below 1.")
        if self.label_gain == "linear" and self.classifier_pooling is not None:
            pooling = self.classifier_pooling
            raise ValueError(f"label_gain='linear' cannot be combined with classifier_pooling={pooling!r}.")
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=True is not supported: embeddings and outputs differ in width.")
