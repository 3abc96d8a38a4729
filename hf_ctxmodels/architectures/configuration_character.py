"""The base configuration of families with a character encoder."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxCharacterConfig(CtxConfig):
    """A character encoder, bidirectional LSTM layers, and pretrained word vectors.

    Args:
        vocab_size: Size of the tokenizer's vocabulary; the encoder does not depend on it.
        hidden_size: Width of a hidden state, both directions concatenated.
        cell_size: Width of each direction's cell state.
        num_hidden_layers: Number of LSTM layers.
        num_characters: Number of character ids: padding, bytes, beginnings and ends, and languages.
        num_languages: Number of languages with a character of their own, the last ids; 0 for none.
        max_characters_per_token: Characters of a word, its beginning and end included; longer words are cut.
        character_embedding_size: Width of a character.
        filters: [width in characters, number of filters] pairs.
        num_highway_layers: Highway layers after the filters.
        hidden_act: Activation of the filters' maxima.
        cell_clip: Bound of the absolute value of a cell; None for no bound.
        projection_clip: Bound of the absolute value of a direction's output.
        initializer_range: Standard deviation of the initialisation of heads.
        pretrained_embeddings: Directory or Hub id of static word embeddings. `load_pretrained_embeddings` copies the
            vectors into a new model; they are saved with it.
        train_pretrained_embeddings: Train these vectors too.
        pretrained_vocab_size, pretrained_embedding_size, pretrained_lower_case: Their number, their width, and whether
            their words are lower-cased; the model class's `embedding_fields` returns these fields.
        classifier_dropout: Dropout before the task heads.
        pad_token_id: Id of padding in the vocabulary.
    """

    vocab_size: int = 1000
    hidden_size: int = 1024
    cell_size: int = 1024
    num_hidden_layers: int = 2
    num_characters: int = 262
    num_languages: int = 0
    max_characters_per_token: int = 50
    character_embedding_size: int = 16
    filters: list[Any] | None = None
    num_highway_layers: int = 0
    hidden_act: str = "relu"
    cell_clip: float | int | None = None
    projection_clip: float | int | None = None
    initializer_range: float | int = 0.02
    pretrained_embeddings: str | None = None
    train_pretrained_embeddings: bool = False
    pretrained_vocab_size: int = 0
    pretrained_embedding_size: int = 0
    pretrained_lower_case: bool = False
    classifier_dropout: float | int = 0.1
    pad_token_id: int | None = 0

    def validate_words(self) -> None:
        """Check the shape (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("vocab_size", "cell_size", "num_hidden_layers", "num_characters")
        if not 0 <= self.num_languages < self.num_characters - 1:
            raise ValueError(f"num_languages={self.num_languages} of num_characters={self.num_characters}.")
        pairs = self.filters or []
        if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError(f"filters={pairs} must be pairs of a width and a number, each 1 or more.")
        if max(width for width, _ in pairs) > self.max_characters_per_token:
            raise ValueError(
                f"A filter has a width of {max(width for width, _ in pairs)} characters, but a word has "
                f"max_characters_per_token={self.max_characters_per_token}."
            )

    @property
    def projection_size(self) -> int:
        """Width of one direction."""
        return self.hidden_size // 2

    @property
    def padding_character(self) -> int:
        """The id of padding after a word's end."""
        return self.num_characters - self.num_languages - 1
