"""Word tokenizer of GloVe."""

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxGloveTokenizer(CtxWordTokenizer):
    """Whole words with their counts, see `CtxWordTokenizer`."""
