"""Byte-level BPE tokenizer of GPT-3: GPT-2's (Brown et al. 2020, section 2.1)."""

from hf_ctxmodels.models.gpt2.tokenization_gpt2 import CtxGpt2Tokenizer


class CtxGpt3Tokenizer(CtxGpt2Tokenizer):
    """GPT-2's tokenizer; see `CtxGpt2Tokenizer`."""
