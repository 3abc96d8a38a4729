"""CVT configuration (Clark et al. 2018, arXiv 1809.08370, section 4 and appendix)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxCharacterConfig

WORD_VIEWS = ("forward", "backward", "future", "past")
TEXT_VIEWS = ("forward", "backward", "beginning", "end")
TARGET_VIEWS = ("attention", "future")
EDGE_VIEWS = ("forward_forward", "forward_backward", "backward_forward", "backward_backward")


@strict
class CtxCvtConfig(CtxCharacterConfig):
    """Shape and regularization of a model for cross-view training; the defaults follow the paper.

    See `CtxCharacterConfig` for the other arguments.

    Args:
        pretrained_embeddings: Vectors concatenated with the character encoder's output, `hidden_size` in total.
        prediction_size: Width of the hidden layer of predictions; for parsing, of heads and of dependents.
        word_dropout: Dropout on the word representations.
        hidden_dropout_prob: Dropout on the outputs of LSTM layers.
        view_dropout: Replaces these two rates in a batch without labels, as in the authors' code.
        views: Names of the auxiliary predictions, see `CrossViewPredictors`, `CrossViewParsers` and, for translation,
            `CtxCvtForConditionalGeneration`; None for all.
        view_weight: Weight of their loss relative to the supervised loss.
        pooling: Pooling of a text: "mean" of its states, or "mean+max", twice as wide.
        text_pairs: Whether sequence classification encodes the two texts of a pair separately; every view reads the
            features (u, v, |u - v|, u * v) of their pooled vectors u and v, and a single text is used as both.
        tasks: Name -> labels of several tagging tasks (section 2.2), in the order of the names; None for one task with
            the labels `id2label`.
        target_vocab_size: Size of the target vocabulary of translation, special tokens included.
        target_embedding_size: Width of the decoder's word embeddings, chosen by this package.
        attention_view_dropout: Dropout on the attention weights of the auxiliary decoder "attention", in training. The
            rate is chosen by this package.
        hard_target_beams: Number of beams of the search for the targets of unlabeled sources, chosen by this package.
        hard_target_max_length: Maximum number of tokens of these targets, chosen by this package.
        decoder_start_token_id, eos_token_id: Ids in the target vocabulary.
    """

    model_type = "ctx-cvt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *CtxCharacterConfig.keys_to_ignore_at_inference,
        *("supervised_loss", "cross_view_loss"),
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
    text_pairs: bool = False
    tasks: dict[str, list[str]] | None = None
    target_vocab_size: int = 30_000
    target_embedding_size: int = 300
    attention_view_dropout: float | int = 0.5
    hard_target_beams: int = 4
    hard_target_max_length: int = 50
    decoder_start_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("target_vocab_size",)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.filters is None:
            self.filters = [[2, 100], [3, 100], [4, 100]]
        if self.tasks is not None:  # the first one is the default; a saved configuration has sorted keys
            self.tasks = dict(sorted(self.tasks.items()))
        super().__post_init__(**kwargs)

    def validate_views(self) -> None:
        """Check views and tasks (called at construction)."""
        available = {*WORD_VIEWS, *TEXT_VIEWS, *TARGET_VIEWS, *EDGE_VIEWS}
        if unknown := sorted({*(self.views or ())} - available):
            raise ValueError(f"views={unknown} are not among {sorted(available)}.")
        self.require_positive("target_vocab_size", "target_embedding_size")
        self.require_positive("hard_target_beams", "hard_target_max_length")
        if self.view_weight < 0:
            raise ValueError(f"view_weight={self.view_weight} must be 0 or more.")
        if self.pretrained_embedding_size >= self.hidden_size:
            raise ValueError(
                f"pretrained_embedding_size={self.pretrained_embedding_size} must be below "
                f"hidden_size={self.hidden_size}, which includes the character encoder's output."
            )
        if self.tasks is not None and (not self.tasks or any(len(labels) < 2 for labels in self.tasks.values())):
            raise ValueError(f"tasks={self.tasks} must have one or more tasks with two or more labels each.")

    @property
    def head_input_size(self) -> int:
        """Width of the primary prediction's input, all LSTM layers (section 3.2)."""
        return self.hidden_size * self.num_hidden_layers
