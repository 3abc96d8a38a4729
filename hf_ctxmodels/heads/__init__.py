"""The heads, written once; a family binds each to its encoder in two lines."""

from hf_ctxmodels.heads.base import (
    IGNORED,
    HeadModel,
    ItemCounts,
    check_classes,
    cross_entropy_over_targets,
    mean_over_targets,
    right_guesses,
    vocabulary_loss,
)
from hf_ctxmodels.heads.beam_span import ForBeamQuestionAnswering
from hf_ctxmodels.heads.downstream import (
    ForMultipleChoice,
    ForQuestionAnswering,
    ForSequenceClassification,
    ForTokenClassification,
    sequence_loss,
)
from hf_ctxmodels.heads.pretraining import ForMaskedLM, ForMaskedLMWithPair
from hf_ctxmodels.heads.text_pairs import EncodesTwoTexts, ForTextPairClassification, compared
from hf_ctxmodels.heads.translation import ForTranslation, TranslationOutput

__all__ = [
    "IGNORED",
    "EncodesTwoTexts",
    "ForBeamQuestionAnswering",
    "ForMaskedLM",
    "ForMaskedLMWithPair",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTextPairClassification",
    "ForTokenClassification",
    "ForTranslation",
    "HeadModel",
    "ItemCounts",
    "TranslationOutput",
    "check_classes",
    "compared",
    "cross_entropy_over_targets",
    "mean_over_targets",
    "right_guesses",
    "sequence_loss",
    "vocabulary_loss",
]
