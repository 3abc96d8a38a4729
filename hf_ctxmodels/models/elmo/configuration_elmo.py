"""ELMo configuration (Peters et al. 2018, arXiv 1802.05365, section 3.4)."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxCharacterConfig


@strict
class CtxElmoConfig(CtxCharacterConfig):
    """Shape and regularization of ELMo; the defaults are the original model.

    See `CtxCharacterConfig` for the other arguments.

    Args:
        vocab_size: Size of the language model's output vocabulary.
        residual: Residual connections around all LSTM layers except the first.
        stateful: Return `past_key_values` by default, so that the next batch can continue from them.
        hidden_dropout_prob: Dropout on the inputs of LSTM layers, and before the language model's output layer.
        num_languages: Above 0 for a polyglot model (Mulcaire et al. 2019, arXiv 1902.09697).
        num_mixes: Number of scalar mixes of the layers; task heads take their concatenation (section 3.3).
        mix_layer_norm: Whether layers are normalized before mixing.
        mix_decay: Weight of the mixes' squared distance from the average in a task head's loss (section 3.3).
        pretrained_embeddings: Word vectors that task heads concatenate with the mixes (section 3.3).
        pooling: Pooling of a sequence: "mean" of its states, or "mean+max", twice as wide.
        text_pairs: Whether sequence classification encodes the two texts of a pair separately, and classifies the
            features (u, v, |u - v|, u * v) of their vectors u and v; a single text is used as both.
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
    text_pairs: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.filters is None:
            self.filters = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]
        super().__post_init__(**kwargs)

    def validate_mixes(self) -> None:
        """Check the fields of the mixes (called at construction)."""
        self.require_positive("num_mixes")
        if self.mix_decay < 0:
            raise ValueError(f"mix_decay={self.mix_decay} must be 0 or more.")

    @property
    def head_input_size(self) -> int:
        """Width of a word's representation in task heads."""
        return self.hidden_size * self.num_mixes + self.pretrained_embedding_size

    @property
    def pooler_size(self) -> int:
        """Width of the classifier's input."""
        return super().pooler_size * (4 if self.text_pairs else 1)
