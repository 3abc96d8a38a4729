"""CoVe configuration (McCann et al. 2017, arXiv 1708.00107, sections 3 to 5)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxCoveConfig(CtxConfig):
    """Shape and regularization of the translation model and the task heads. See `CtxConfig` for the other arguments.

    Args:
        vocab_size, target_vocab_size: Sizes of the source and the target vocabulary, special tokens included.
        embedding_size: Width of the pretrained embeddings, and of the decoder's embeddings.
        hidden_size: Width of the hidden states, in the encoder of both directions concatenated.
        num_hidden_layers: Number of LSTM layers of the encoder, and of the decoder.
        pretrained_embeddings: Directory or Hub id of static word embeddings with the source vocabulary.
            `load_pretrained_embeddings` copies the vectors into a new model, which saves them.
        train_pretrained_embeddings: Whether the vectors are trained.
        decoder_attention: Whether the decoder attends to the encoder's states; False for a baseline whose decoder only
            starts from the encoder's final states.
        hidden_dropout_prob: Dropout on the inputs of LSTM layers except the encoder's first, and before the
            decoder's output layer.
        initializer_range: Standard deviation of the initialization of embeddings and linear layers.
        task_context: Whether task heads take the encoder's states in addition to the embeddings.
        freeze_context: Whether the encoder is frozen in task heads.
        biattention_size: Width per direction of the classification network's LSTM states.
        maxout_pieces: Number of linear layers in a maxout layer.
        classifier_dropout: Dropout on a task head's input, and before its output.
        unk_token_id: Id of unknown source words, whose vector is zero.
        decoder_start_token_id, eos_token_id: Ids in the target vocabulary.
    """

    model_type = "ctx-cove"

    vocab_size: int = 30_000
    target_vocab_size: int = 30_000
    embedding_size: int = 300
    hidden_size: int = 600
    num_hidden_layers: int = 2
    pretrained_embeddings: str | None = None
    train_pretrained_embeddings: bool = False
    decoder_attention: bool = True
    hidden_dropout_prob: float | int = 0.2
    initializer_range: float | int = 0.1
    task_context: bool = True
    freeze_context: bool = False
    biattention_size: int = 300
    maxout_pieces: int = 4
    classifier_dropout: float | int = 0.1
    pad_token_id: int | None = 0
    unk_token_id: int | None = 1
    decoder_start_token_id: int | None = 2
    eos_token_id: int | None = 3
    is_encoder_decoder: bool = True

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("target_vocab_size",)

    def validate_shape(self) -> None:
        """Check the shape (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("target_vocab_size", "num_hidden_layers", "biattention_size")
        if self.maxout_pieces < 2:
            raise ValueError(f"maxout_pieces={self.maxout_pieces} must be 2 or more.")

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all hidden states: the embeddings, the lower layers, and the encoder's output."""
        lower_layers = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size, *lower_layers, self.embedding_size + self.hidden_size]

    @property
    def head_input_size(self) -> int:
        """Width of a word's representation in task heads."""
        return self.embedding_size + (self.hidden_size if self.task_context else 0)

    @property
    def pooler_size(self) -> int:
        """Width of the pooled vector of the classification network: two texts, four poolings, two directions."""
        return 2 * 4 * 2 * self.biattention_size
