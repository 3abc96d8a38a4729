"""Word tokenizer of GloVe."""

from hf_ctxmodels.tokenization_words import CtxWordTokenizer


class CtxGloveTokenizer(CtxWordTokenizer):
    """Whole words with their counts, see `CtxWordTokenizer`."""
