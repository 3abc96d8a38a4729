"""Evaluation: perplexity, minimal pairs, clozes, word vectors and sentence vectors."""

from hf_ctxmodels.evaluation.clozes import Cloze, score_clozes
from hf_ctxmodels.evaluation.minimal_pairs import (
    MinimalPair,
    PairResult,
    evaluate_pairs,
    read_pairs,
    total_result,
    unigram_scorer,
)
from hf_ctxmodels.evaluation.originality import detects_replaced_tokens, score_originality
from hf_ctxmodels.evaluation.perplexity import Perplexity, measure_perplexity
from hf_ctxmodels.evaluation.scoring import (
    TextScore,
    TokenScore,
    language_model_class,
    likelihood_kind,
    score,
    score_tokens,
)
from hf_ctxmodels.evaluation.sentence_tests import (
    Criterion,
    Encode,
    Probe,
    SentenceSimilarity,
    classification,
    probe,
    read_labeled_splits,
    read_rated_splits,
    read_test_pairs,
    relatedness,
    retrieval,
    similarity,
)
from hf_ctxmodels.evaluation.words import (
    AnalogyResult,
    SimilarityResult,
    WordSpace,
    evaluate_analogies,
    evaluate_similarity,
    read_analogies,
    read_similarities,
)
