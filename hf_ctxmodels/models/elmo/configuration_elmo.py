"""ELMo configuration (Peters et al. 2018, arXiv 1802.05365, section 3.4)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.configuration_base import CtxConfig

_FILTERS = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]


@strict
class CtxElmoConfig(CtxConfig):
    """Shape and regularisation of an ELMo; the defaults are the original model.

    Args:
        vocab_size: Number of words that the language model predicts; the encoder reads any.
        hidden_size: Width of a state: the projections of both directions.
        cell_size: Width of each direction's cell.
        num_hidden_layers: LSTM layers behind the characters.
        num_characters: Character ids: bytes, what marks beginnings, ends and padding, and 0 for no character at all.
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

    @property
    def task_size(self) -> int:
        """Width of what a task head reads of every word."""
        return self.hidden_size * self.num_mixes

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output` of a task head."""
        return self.task_size * (2 if self.pooling == "mean+max" else 1)

    @property
    def head_dropout(self) -> float | int:
        """Dropout rate before a task head."""
        return self.classifier_dropout
