"""ELMo configuration (Peters et al. 2018, arXiv 1802.05365, section 3.4)."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_character import CtxCharacterConfig

_FILTERS = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]


@strict
class CtxElmoConfig(CtxCharacterConfig):
    """Shape and regularisation of an ELMo; the defaults are the original model.

    Args: those of `CtxCharacterConfig`, and
        vocab_size: Number of words that the language model predicts; the encoder reads any.
        residual: Every LSTM layer but the first adds its input to its output.
        stateful: Return `past_key_values`, with which the next batch may continue, unless `use_cache=False` is given.
        hidden_dropout_prob: Dropout on the input of every LSTM layer, and before the language model's prediction.
        num_languages: More than 0: one model of several languages (Mulcaire et al. 2019, arXiv 1902.09697).
        num_mixes: Number of mixes of the layers that a task head reads, concatenated.
        mix_layer_norm: Normalise every layer before it is mixed.
        mix_decay: What multiplies the squared distance of the mixes from the average in the loss of a task head (3.4).
        pretrained_embeddings: Task heads read the mixes concatenated with these vectors (section 3.3).
        pooling: What stands for a sequence: the "mean" of its words' states, or "mean+max", twice as wide.
    """

    model_type = "ctx-elmo"

    vocab_size: int = 793_471
    cell_size: int = 4096
    num_highway_layers: int = 2
    residual: bool = True
    cell_clip: float | int | None = 3.0
    projection_clip: float | int | None = 3.0
    stateful: bool = False
    hidden_dropout_prob: float | int = 0.1
    num_mixes: int = 1
    mix_layer_norm: bool = False
    mix_decay: float | int = 0.0
    pooling: Literal["mean", "mean+max"] = "mean"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.filters is None:
            self.filters = [list(pair) for pair in _FILTERS]
        super().__post_init__(**kwargs)

    def validate_mixes(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.num_mixes < 1:
            raise ValueError(f"num_mixes={self.num_mixes} must be 1 or more.")
        if self.mix_decay < 0:
            raise ValueError(f"mix_decay={self.mix_decay} must be 0 or more.")

    @property
    def task_size(self) -> int:
        """Width of what a task head reads of every word."""
        return self.hidden_size * self.num_mixes + self.static_size

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output` of a task head."""
        return self.task_size * (2 if self.pooling == "mean+max" else 1)
