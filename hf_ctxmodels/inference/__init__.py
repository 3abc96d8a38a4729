"""Using fine-tuned models, where transformers has no pipeline for it."""

from hf_ctxmodels.inference.ensemble import EnsembleScores, score_ensemble
from hf_ctxmodels.inference.question_answering import answer_questions
from hf_ctxmodels.inference.token_classification import WordTaggingPipeline
from hf_ctxmodels.inference.translation import Score, score_translations, translate

__all__ = [
    "EnsembleScores",
    "Score",
    "WordTaggingPipeline",
    "answer_questions",
    "score_ensemble",
    "score_translations",
    "translate",
]
