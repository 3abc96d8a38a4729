"""Tokenizer of ELMo."""

from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer


class CtxElmoTokenizer(CtxCharacterTokenizer):
    """Words as characters, see `CtxCharacterTokenizer`; the vocabulary is the language model's output vocabulary."""
