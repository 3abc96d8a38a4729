"""Pretraining objectives: what a row holds, what is corrupted in it, and what is predicted."""

from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.masked_lm import DataCollatorForMaskedLanguageModeling, MaskedLM
from hf_ctxmodels.objectives.masking import MaskingRule, TokenMasker
from hf_ctxmodels.objectives.next_sentence import DataCollatorForNextSentencePrediction, MaskedLMWithNextSentence

__all__ = [
    "DataCollatorForMaskedLanguageModeling",
    "DataCollatorForNextSentencePrediction",
    "MaskedLM",
    "MaskedLMWithNextSentence",
    "MaskingRule",
    "Objective",
    "TokenMasker",
]
