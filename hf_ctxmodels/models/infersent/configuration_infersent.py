"""InferSent configuration (Conneau et al. 2017, arXiv 1705.02364, section 3)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxInferSentConfig(CtxConfig):
    """Shape of the encoder, and of what compares two sentences.

    Args:
        vocab_size: Words of the table of fixed vectors, special tokens included.
        embedding_size: Width of the fixed vectors.
        hidden_size: Width of a word's state and of a sentence's vector: that of both directions together.
        num_hidden_layers: LSTM layers; the paper has one.
        pooling: What stands for a sentence: the largest value ("max") or the "mean" of its words' states.
        pretrained_embeddings: A directory or Hub id of a family with one vector for each word, of the same vocabulary.
            `load_pretrained_embeddings` copies the vectors into a new model; they are saved with it.
        train_vectors: Train the vectors too.
        skip_unknown: Leave unknown words out, as the released code does, unless there is no other in the text; else
            they are read as zero vectors.
        hidden_dropout_prob: Dropout on what an LSTM layer reads.
        text_pairs: The classifier reads two texts; else it is a linear one of a single text.
        classifier_size: Width of the two hidden layers of the classifier of pairs.
        classifier_nonlinear: Have a tanh behind these, and dropout before every layer; without, as in the paper, the
            three layers are together a linear map.
        classifier_dropout: Dropout before the classifier.
        initializer_range: Standard deviation of the initialisation of the classifier.
        pad_token_id: Padding.
        unk_token_id: Unknown words, whose vector is zero.
    """

    model_type = "ctx-infersent"

    vocab_size: int = 30_000
    embedding_size: int = 300
    hidden_size: int = 4096
    num_hidden_layers: int = 1
    pooling: Literal["max", "mean"] = "max"
    pretrained_embeddings: str | None = None
    train_vectors: bool = False
    skip_unknown: bool = True
    hidden_dropout_prob: float | int = 0.0
    text_pairs: bool = True
    classifier_size: int = 512
    classifier_nonlinear: bool = False
    classifier_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    pad_token_id: int | None = 0
    unk_token_id: int | None = 1

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")
        for name in ("vocab_size", "embedding_size", "num_hidden_layers", "classifier_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every hidden state: the vectors, and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
