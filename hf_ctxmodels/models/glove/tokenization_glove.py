"""Word tokenizer of GloVe."""

from hf_ctxmodels.tokenizers.words import CtxWordTokenizer


class CtxGloveTokenizer(CtxWordTokenizer):
    """Whole words with their counts, see `CtxWordTokenizer`."""
