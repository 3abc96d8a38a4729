"""Using fine-tuned models, where transformers has no pipeline for it."""

from hf_ctxmodels.downstream.question_answering import answer_questions
from hf_ctxmodels.downstream.token_classification import WordTaggingPipeline

__all__ = ["WordTaggingPipeline", "answer_questions"]
