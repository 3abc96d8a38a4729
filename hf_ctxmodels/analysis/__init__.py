"""Looking into models: what their vectors say of words."""

from hf_ctxmodels.analysis.word_relations import WordSpace
from hf_ctxmodels.analysis.word_tests import (
    AnalogyResult,
    SimilarityResult,
    evaluate_analogies,
    evaluate_similarity,
    read_analogies,
    read_similarities,
)

__all__ = [
    "AnalogyResult",
    "SimilarityResult",
    "WordSpace",
    "evaluate_analogies",
    "evaluate_similarity",
    "read_analogies",
    "read_similarities",
]
