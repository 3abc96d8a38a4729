"""Tokenizer of ELMo."""

from hf_ctxmodels.tokenization_spelled import CtxSpelledTokenizer


class CtxElmoTokenizer(CtxSpelledTokenizer):
    """Words as their characters, see `CtxSpelledTokenizer`.

    The vocabulary is what the language model predicts. With `languages`, words may be tagged by their language
    (polyglot models: Mulcaire et al. 2019, arXiv 1902.09697).
    """
