"""Evaluation of the vectors of words and sentences."""

from hf_ctxmodels.evaluation.minimal_pairs import (
    MinimalPair,
    PairResult,
    evaluate_pairs,
    read_pairs,
    total,
    unigram_scorer,
)
from hf_ctxmodels.evaluation.sentence_tests import (
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
from hf_ctxmodels.evaluation.word_relations import WordSpace
from hf_ctxmodels.evaluation.word_tests import (
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
    "MinimalPair",
    "PairResult",
    "Probe",
    "SentenceSimilarity",
    "SimilarityResult",
    "WordSpace",
    "classification",
    "evaluate_analogies",
    "evaluate_pairs",
    "evaluate_similarity",
    "probe",
    "read_analogies",
    "read_pairs",
    "read_similarities",
    "relatedness",
    "retrieval",
    "similarity",
    "total",
    "unigram_scorer",
]
