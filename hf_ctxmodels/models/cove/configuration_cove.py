"""CoVe configuration (McCann et al. 2017, arXiv 1708.00107, sections 3 to 5)."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxCoveConfig(CtxConfig):
    """Shape and regularisation of the translation model and of what stands on its encoder.

    Args:
        vocab_size: Words of the source language, those of the table of fixed vectors, special tokens included.
        target_vocab_size: Tokens of the target language.
        embedding_size: Width of the fixed vectors, and of the decoder's embeddings.
        hidden_size: Width of a state of the encoder, of both directions together, and of one of the decoder.
        num_hidden_layers: LSTM layers of the encoder, and of the decoder.
        pretrained_embeddings: A directory or Hub id of a family with one vector for each word, of the same vocabulary
            as the source language's. `load_pretrained_embeddings` copies the vectors into a new model; they are saved
            with it.
        train_vectors: Train the vectors too.
        decoder_attention: Attend to the encoder's states; without, the decoder starts from the last ones and knows no
            more of the source: a plain sequence-to-sequence model, to compare with.
        hidden_dropout_prob: Dropout on the input of every LSTM layer but the encoder's first, and before the decoder's
            prediction.
        initializer_range: Standard deviation of the initialisation of vectors and of what stands on the LSTMs.
        task_context: Task heads read the encoder's states behind the vectors; without, the vectors alone.
        freeze_context: Task heads leave the encoder as it is.
        biattention_size: Width of the classification network's LSTM states, in each direction.
        maxout_pieces: Linear maps of which a maxout layer takes the largest.
        classifier_dropout: Dropout on what a task head reads, and before its output.
        pad_token_id: Padding, in both vocabularies.
        unk_token_id: Unknown words of the source language, whose vector is zero.
        decoder_start_token_id, eos_token_id: Of the target language.
    """

    model_type = "ctx-cove"

    vocab_size: int = 30_000
    target_vocab_size: int = 30_000
    embedding_size: int = 300
    hidden_size: int = 600
    num_hidden_layers: int = 2
    pretrained_embeddings: str | None = None
    train_vectors: bool = False
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
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")
        for name in ("vocab_size", "target_vocab_size", "embedding_size", "num_hidden_layers", "biattention_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.maxout_pieces < 2:
            raise ValueError(f"maxout_pieces={self.maxout_pieces} must be 2 or more.")

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every hidden state: the vectors, the layers, and what leaves the encoder."""
        layers = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size, *layers, self.embedding_size + self.hidden_size]

    @property
    def task_size(self) -> int:
        """Width of what a task head reads of every word."""
        return self.embedding_size + (self.hidden_size if self.task_context else 0)

    @property
    def pooled_size(self) -> int:
        """Width of what the classification network pools: of two texts, four values of each feature."""
        return 2 * 4 * 2 * self.biattention_size
