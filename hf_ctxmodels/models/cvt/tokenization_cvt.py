"""Tokenizer of CVT."""

from hf_ctxmodels.tokenization_spelled import CtxSpelledTokenizer


class CtxCvtTokenizer(CtxSpelledTokenizer):
    """Words as their characters, see `CtxSpelledTokenizer`; the model reads any word, so no vocabulary is needed."""
