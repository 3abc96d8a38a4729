"""CoVe configuration (McCann et al. 2017, arXiv 1708.00107, sections 3 to 5)."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxCoveConfig(CtxConfig):
    """Shape and regularisation of the translation model and the task heads.

    Args:
        vocab_size: Size of the source vocabulary, special tokens included.
        target_vocab_size: Size of the target vocabulary.
        embedding_size: Width of the pretrained embeddings, and of the decoder's embeddings.
        hidden_size: Width of the encoder's (both directions concatenated) and the decoder's hidden states.
        num_hidden_layers: Number of LSTM layers of the encoder, and of the decoder.
        pretrained_embeddings: Directory or Hub id of static word embeddings with the source vocabulary.
            `load_pretrained_embeddings` copies the vectors into a new model; they are saved with it.
        train_pretrained_embeddings: Train the vectors too.
        decoder_attention: Attend to the encoder's states; False for a plain sequence-to-sequence model as a baseline,
            whose decoder starts from the encoder's final states.
        hidden_dropout_prob: Dropout on the input of every LSTM layer but the encoder's first, and before the decoder's
            prediction.
        initializer_range: Standard deviation of the initialisation of embeddings and linear layers.
        task_context: Task heads take the embeddings concatenated with the encoder's states; False for the embeddings.
        freeze_context: Task heads do not train the encoder.
        biattention_size: Width of the classification network's LSTM states per direction.
        maxout_pieces: Number of linear maps in a maxout layer.
        classifier_dropout: Dropout on a task head's input, and before its output.
        pad_token_id: Id of padding in both vocabularies.
        unk_token_id: Id of unknown source words, which have a zero vector.
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

    def validate_shape(self) -> None:
        """Check the shape (called at construction)."""
        self.require_even_hidden_size()
        sizes = ("vocab_size", "target_vocab_size", "embedding_size", "num_hidden_layers", "biattention_size")
        self.require_positive(*sizes)
        if self.maxout_pieces < 2:
            raise ValueError(f"maxout_pieces={self.maxout_pieces} must be 2 or more.")

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all hidden states: the embeddings, the layers, and the encoder's output."""
        layers = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size, *layers, self.embedding_size + self.hidden_size]

    @property
    def head_input_size(self) -> int:
        """Width of a word's representation for task heads."""
        return self.embedding_size + (self.hidden_size if self.task_context else 0)

    @property
    def pooler_size(self) -> int:
        """Width of the classification network's pooled vector: two texts, four poolings, two directions."""
        return 2 * 4 * 2 * self.biattention_size
