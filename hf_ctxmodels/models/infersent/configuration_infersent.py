"""InferSent configuration (Conneau et al. 2017, arXiv 1705.02364, section 3)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxInferSentConfig(CtxConfig):
    """Shape of the encoder and of the classifier of text pairs. See `CtxConfig` for the other arguments.

    Args:
        vocab_size, embedding_size: Number and width of the pretrained embeddings, special tokens included.
        hidden_size: Width of hidden states and of sentence embeddings, both directions concatenated.
        num_hidden_layers: Number of LSTM layers; the paper has one.
        pooling: Pooling of a sentence's hidden states.
        pretrained_embeddings: Directory or Hub id of static word embeddings with the same vocabulary.
            `load_pretrained_embeddings` copies the vectors into a new model, which saves them.
        train_pretrained_embeddings: Whether the vectors are trained.
        skip_unknown: Skip unknown words as in the released code, unless a text has no other words; False encodes them
            as zero vectors.
        hidden_dropout_prob: Dropout on the input of LSTM layers.
        text_pairs: Whether text pairs are classified; False for a linear classifier of single texts.
        classifier_size: Width of the two hidden layers of the pair classifier.
        classifier_nonlinear: Tanh after these layers and dropout before every layer; in the paper, the three layers are
            linear.
        initializer_range: Standard deviation of the initialization of the classifier.
        unk_token_id: Id of unknown words, whose vector is zero.
    """

    model_type = "ctx-infersent"

    vocab_size: int = 30_000
    embedding_size: int = 300
    hidden_size: int = 4096
    num_hidden_layers: int = 1
    pooling: Literal["max", "mean"] = "max"
    pretrained_embeddings: str | None = None
    train_pretrained_embeddings: bool = False
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
        """Check the shape (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("num_hidden_layers", "classifier_size")

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all hidden states: the embeddings and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
