"""The configuration of families with a character encoder."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxCharacterConfig(CtxConfig):
    """A character encoder, bidirectional LSTM layers, and word vectors of another model.

    Args:
        vocab_size: Number of words that the tokenizer knows; the encoder reads any.
        hidden_size: Width of a hidden state, of both directions together.
        cell_size: Width of each direction's cell state.
        num_hidden_layers: LSTM layers.
        num_characters: Number of character ids: 0 for no character, bytes, marks of beginnings, ends and padding, and
            languages.
        num_languages: Number of languages whose words begin with a character of their own, the last ones; 0 for none.
        max_characters_per_token: Characters of a word, its beginning and end included; longer words are cut.
        character_embedding_size: Width of a character.
        filters: [characters a filter reads, number of such filters].
        num_highway_layers: Highway layers after the filters.
        hidden_act: Activation of the filters' maxima.
        cell_clip: Largest absolute value of a cell; None for no limit.
        projection_clip: Of a direction's output.
        initializer_range: Standard deviation of the initialisation of heads.
        pretrained_embeddings: A directory or Hub id of a family with one vector for each word.
            `load_pretrained_embeddings` copies the vectors into a new model; they are saved with it.
        static_trainable: Train these vectors too.
        static_words, static_size, static_lower_case: Their number, their width, and whether words are lower-cased; the
            model class's `embedding_fields` returns them.
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
    static_trainable: bool = False
    static_words: int = 0
    static_size: int = 0
    static_lower_case: bool = False
    classifier_dropout: float | int = 0.1
    pad_token_id: int | None = 0

    def validate_words(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")
        for name in ("vocab_size", "cell_size", "num_hidden_layers", "num_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
        if not 0 <= self.num_languages < self.num_characters - 1:
            raise ValueError(f"num_languages={self.num_languages} of num_characters={self.num_characters}.")
        pairs = self.filters or []
        if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError(f"filters={pairs} must be pairs of a width and a number, each 1 or more.")
        if max(width for width, _ in pairs) > self.max_characters_per_token:
            raise ValueError(
                f"A filter reads {max(width for width, _ in pairs)} characters, but a word has "
                f"max_characters_per_token={self.max_characters_per_token}."
            )

    @property
    def projection_size(self) -> int:
        """Width of one direction."""
        return self.hidden_size // 2

    @property
    def padding_character(self) -> int:
        """The id that fills a word after its end."""
        return self.num_characters - self.num_languages - 1
