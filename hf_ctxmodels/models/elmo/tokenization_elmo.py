"""Tokenizer of ELMo."""

from hf_ctxmodels.tokenizers.characters import CtxCharacterTokenizer


class CtxElmoTokenizer(CtxCharacterTokenizer):
    """Words as their characters, see `CtxCharacterTokenizer`.

    The vocabulary is what the language model predicts. With `languages`, words may be tagged by their language
    (polyglot models: Mulcaire et al. 2019, arXiv 1902.09697).
    """
