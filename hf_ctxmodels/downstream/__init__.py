"""Using fine-tuned models, where transformers has no pipeline for it."""

from hf_ctxmodels.downstream.question_answering import answer_questions
from hf_ctxmodels.downstream.token_classification import WordTaggingPipeline
from hf_ctxmodels.downstream.translation import Score, score_translations, translate

__all__ = ["Score", "WordTaggingPipeline", "answer_questions", "score_translations", "translate"]
