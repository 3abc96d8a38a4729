"""Tokenizer of MASS for translation; the model for summaries has BERT's."""

from hf_ctxmodels.models.xlm.tokenization_xlm import CtxXLMTokenizer


class CtxMassTokenizer(CtxXLMTokenizer):
    """XLM's tokenizer: the joint BPE of all languages."""
