"""Evaluation: perplexity, minimal pairs, word vectors and sentence vectors."""

from hf_ctxmodels.evaluation.minimal_pairs import (
    MinimalPair,
    PairResult,
    evaluate_pairs,
    read_pairs,
    total_result,
    unigram_scorer,
)
from hf_ctxmodels.evaluation.perplexity import Perplexity, measure_perplexity
from hf_ctxmodels.evaluation.scoring import TextScore, score
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
    "Perplexity",
    "Probe",
    "SentenceSimilarity",
    "SimilarityResult",
    "TextScore",
    "WordSpace",
    "classification",
    "evaluate_analogies",
    "evaluate_pairs",
    "evaluate_similarity",
    "measure_perplexity",
    "probe",
    "read_analogies",
    "read_pairs",
    "read_similarities",
    "relatedness",
    "retrieval",
    "score",
    "similarity",
    "total_result",
    "unigram_scorer",
]
