"""Tokenizer of CVT."""

from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer


class CtxCvtTokenizer(CtxCharacterTokenizer):
    """Words as characters, see `CtxCharacterTokenizer`; no vocabulary is needed."""
