"""ELMo configuration (Peters et al. 2018, arXiv 1802.05365, section 3.4)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoTokenizer

from hf_ctxmodels.configuration_base import CtxConfig
from hf_ctxmodels.errors import CtxError

_FILTERS = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]


@strict
class CtxElmoConfig(CtxConfig):
    """Shape and regularisation of an ELMo; the defaults are the original model.

    Args:
        vocab_size: Number of words that the language model predicts; the encoder reads any.
        hidden_size: Width of a state: the projections of both directions.
        cell_size: Width of each direction's cell.
        num_hidden_layers: LSTM layers behind the characters.
        num_characters: Character ids: bytes, what marks beginnings, ends and padding, those of languages, and 0 for no
            character at all.
        num_languages: How many of the characters, the last ones, begin a word of a certain language; 0 where words
            have none (one model of several languages: Mulcaire et al. 2019, arXiv 1902.09697).
        max_characters_per_token: Characters of a word, its beginning and end included; longer words are cut.
        character_embedding_size: Width of a character.
        filters: [characters a filter reads, number of such filters].
        num_highway_layers: Behind the filters.
        hidden_act: Of the filters' largest values.
        residual: Every LSTM layer but the first adds its input to its output.
        cell_clip: Largest absolute value of a cell; None for no limit.
        projection_clip: Of a direction's output.
        stateful: Return the LSTM's state, from which the next batch may go on, unless `use_states=False` is given.
        hidden_dropout_prob: Dropout on the input of every LSTM layer, and before the language model's prediction.
        initializer_range: Standard deviation of the initialisation of what stands on the encoder.
        num_mixes: How many mixes of the layers a task head reads, one behind the other.
        mix_layer_norm: Normalise every layer before it is mixed.
        mix_decay: What multiplies the squared distance of the mixes from the average in the loss of a task head (3.4).
        static_model: A directory or Hub id of a family with one vector for each word. Task heads read these vectors
            behind the mixes (section 3.3); they are copied from there into a new head, and saved with it.
        static_trainable: Train these vectors too.
        static_words, static_size, static_lower_case: Their number, width, and whether words are lower-cased; taken
            from `static_model`.
        pooling: What stands for a sequence: the "mean" of its words' states, or "mean+max", twice as wide.
        classifier_dropout: Dropout before the task heads.
        pad_token_id: Id of padding in the vocabulary.
    """

    model_type = "ctx-elmo"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [*CtxConfig.keys_to_ignore_at_inference, "states"]

    vocab_size: int = 793_471
    hidden_size: int = 1024
    cell_size: int = 4096
    num_hidden_layers: int = 2
    num_characters: int = 262
    num_languages: int = 0
    max_characters_per_token: int = 50
    character_embedding_size: int = 16
    filters: list[Any] | None = None
    num_highway_layers: int = 2
    hidden_act: str = "relu"
    residual: bool = True
    cell_clip: float | int | None = 3.0
    projection_clip: float | int | None = 3.0
    stateful: bool = False
    hidden_dropout_prob: float | int = 0.1
    initializer_range: float | int = 0.02
    num_mixes: int = 1
    mix_layer_norm: bool = False
    mix_decay: float | int = 0.0
    static_model: str | None = None
    static_trainable: bool = False
    static_words: int = 0
    static_size: int = 0
    static_lower_case: bool = False
    pooling: Literal["mean", "mean+max"] = "mean"
    classifier_dropout: float | int = 0.1
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.filters is None:
            self.filters = [list(pair) for pair in _FILTERS]
        super().__post_init__(**kwargs)

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: it is that of two directions.")
        for name in ("vocab_size", "cell_size", "num_hidden_layers", "num_characters", "num_mixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
        if not 0 <= self.num_languages < self.num_characters - 1:
            raise ValueError(f"num_languages={self.num_languages} of num_characters={self.num_characters}.")
        if self.mix_decay < 0:
            raise ValueError(f"mix_decay={self.mix_decay} must be 0 or more.")
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
        """Width of one direction, and of the token layer before it is doubled."""
        return self.hidden_size // 2

    def measure_static_model(self) -> None:
        """Fill in what the fixed vectors of `static_model` are like, unless it is known already.

        Raises:
            CtxError: `static_model` cannot be opened.
        """
        if self.static_model is None or self.static_size:
            return
        try:
            static = AutoConfig.from_pretrained(self.static_model)
            tokenizer = AutoTokenizer.from_pretrained(self.static_model)
        except (OSError, ValueError) as error:
            raise CtxError(
                f"Cannot open the model of the fixed vectors: {error}",
                where=self.static_model,
                mend="name one that is there, with its tokenizer.",
            ) from error
        self.static_words, self.static_size = static.vocab_size, static.hidden_size
        self.static_lower_case = bool(getattr(tokenizer, "do_lower_case", False))

    @property
    def padding_character(self) -> int:
        """What fills a word behind its end."""
        return self.num_characters - self.num_languages - 1

    @property
    def task_size(self) -> int:
        """Width of what a task head reads of every word."""
        return self.hidden_size * self.num_mixes + self.static_size

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output` of a task head."""
        return self.task_size * (2 if self.pooling == "mean+max" else 1)

    @property
    def head_dropout(self) -> float | int:
        """Dropout rate before a task head."""
        return self.classifier_dropout
