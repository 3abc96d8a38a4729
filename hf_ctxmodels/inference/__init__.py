"""Inference: text generation, pipelines that transformers lacks, ensembles, sentence vectors and export."""

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.core.generation import decode_generated
from hf_ctxmodels.evaluation.scoring import TextScore, score
from hf_ctxmodels.inference.ensemble import EnsembleScores, score_ensemble
from hf_ctxmodels.inference.generation import generate_texts
from hf_ctxmodels.inference.news_fields import field_loss, generate_field
from hf_ctxmodels.inference.question_answering import answer_questions
from hf_ctxmodels.inference.token_classification import WordTaggingPipeline

__all__ = [
    "EnsembleScores",
    "TextScore",
    "WordTaggingPipeline",
    "answer_questions",
    "decode_generated",
    "encode_sentences",
    "field_loss",
    "generate_field",
    "generate_texts",
    "score",
    "score_ensemble",
]
