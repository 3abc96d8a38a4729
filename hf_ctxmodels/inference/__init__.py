"""Inference: text generation, pipelines, ensembles, vectors of sentences and words, and export."""

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.generation import decode_generated
from hf_ctxmodels.evaluation.scoring import TextScore, score
from hf_ctxmodels.inference.control import ClassifierGuidance, allowed_answers, bag_of_words
from hf_ctxmodels.inference.ensembles import EnsembleScores, score_ensemble
from hf_ctxmodels.inference.generation import generate_texts
from hf_ctxmodels.inference.news_fields import detection_examples, field_loss, generate_field, generate_fields
from hf_ctxmodels.inference.prediction import Predictor
from hf_ctxmodels.inference.task_heads import WordTaggingPipeline, answer_questions
