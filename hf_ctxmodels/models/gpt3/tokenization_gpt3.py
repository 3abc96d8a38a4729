"""Byte-level BPE tokenizer of GPT-3, the same as GPT-2's (Brown et al. 2020, section 2.1)."""

from hf_ctxmodels.models.gpt2.tokenization_gpt2 import CtxGpt2Tokenizer


class CtxGpt3Tokenizer(CtxGpt2Tokenizer):
    """Tokenizer of GPT-3. See `CtxGpt2Tokenizer` for arguments, training and errors."""
