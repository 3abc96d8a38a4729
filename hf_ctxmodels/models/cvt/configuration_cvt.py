"""CVT configuration (Clark et al. 2018, arXiv 1809.08370, section 4 and appendix)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_character import CtxCharacterConfig
from hf_ctxmodels.models.cvt.cross_view import TEXT_VIEWS, WORD_VIEWS

_FILTERS = [[2, 100], [3, 100], [4, 100]]


@strict
class CtxCvtConfig(CtxCharacterConfig):
    """Shape and regularisation of a model for cross-view training; the defaults are the paper's.

    Args: those of `CtxCharacterConfig`, and
        pretrained_embeddings: Its vectors are concatenated with the character encoder's, to `hidden_size` together.
        prediction_size: Width of the layer between states and labels.
        word_dropout: Dropout on the words.
        hidden_dropout_prob: Dropout on the output of every LSTM layer.
        view_dropout: Dropout in place of these two in a batch without labels, where only auxiliary predictions learn;
            as in the authors' code.
        views: Auxiliary predictions; None for all of them: of words forward, backward, future and past (section 3.2),
            of texts forward, backward, beginning and end.
        view_weight: Weight of their loss, relative to that of the labels.
        pooling: What stands for a text: the "mean" of its words' states, or "mean+max", twice as wide.
        tasks: Name -> labels, for a tagger of several tasks (section 3.4); None for one, whose labels are `id2label`.
    """

    model_type = "ctx-cvt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *CtxCharacterConfig.keys_to_ignore_at_inference,
        "supervised_loss",
        "cross_view_loss",
    ]

    num_characters: int = 262
    character_embedding_size: int = 50
    prediction_size: int = 512
    word_dropout: float | int = 0.5
    hidden_dropout_prob: float | int = 0.5
    view_dropout: float | int = 0.2
    classifier_dropout: float | int = 0.0
    views: list[str] | None = None
    view_weight: float | int = 1.0
    pooling: Literal["mean", "mean+max"] = "mean+max"
    tasks: dict[str, list[str]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.filters is None:
            self.filters = [list(pair) for pair in _FILTERS]
        super().__post_init__(**kwargs)

    def validate_views(self) -> None:
        """Check what must fit together (called at construction)."""
        known = {*WORD_VIEWS, *TEXT_VIEWS}
        if unknown := sorted({*(self.views or ())} - known):
            raise ValueError(f"views={unknown} are not among {sorted(known)}.")
        if self.view_weight < 0:
            raise ValueError(f"view_weight={self.view_weight} must be 0 or more.")
        if self.static_size >= self.hidden_size:
            raise ValueError(
                f"The fixed vectors, of width {self.static_size}, leave nothing of hidden_size={self.hidden_size} to "
                "the characters."
            )
        if self.tasks is not None and (not self.tasks or any(len(labels) < 2 for labels in self.tasks.values())):
            raise ValueError(f"tasks={self.tasks} must name one or more, of two labels or more each.")

    @property
    def task_size(self) -> int:
        """Width of a primary prediction's input of every word: all LSTM layers (section 4.1)."""
        return self.hidden_size * self.num_hidden_layers

    @property
    def pooled_size(self) -> int:
        """Width of a pooled text, which it reads."""
        return self.task_size * (2 if self.pooling == "mean+max" else 1)
