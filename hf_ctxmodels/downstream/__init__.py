"""Using fine-tuned models, where transformers has no pipeline for it."""

from hf_ctxmodels.downstream.question_answering import answer_questions

__all__ = ["answer_questions"]
