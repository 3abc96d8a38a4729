"""Tokenizer of CVT."""

from hf_ctxmodels.tokenizers.characters import CtxCharacterTokenizer


class CtxCvtTokenizer(CtxCharacterTokenizer):
    """Words as their characters, see `CtxCharacterTokenizer`; the model reads any word, so no vocabulary is needed."""
