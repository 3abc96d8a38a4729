"""Evaluation of the vectors of words and sentences."""

from hf_ctxmodels.analysis.sentence_tests import (
    Criterion,
    Encode,
    Probe,
    SentenceSimilarity,
    classification,
    probe,
    relatedness,
    retrieval,
    similarity,
)
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
    "Criterion",
    "Encode",
    "Probe",
    "SentenceSimilarity",
    "SimilarityResult",
    "WordSpace",
    "classification",
    "evaluate_analogies",
    "evaluate_similarity",
    "probe",
    "read_analogies",
    "read_similarities",
    "relatedness",
    "retrieval",
    "similarity",
]
