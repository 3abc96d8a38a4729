"""Word tokenizer of GloVe."""

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxGloveTokenizer(CtxWordTokenizer):
    """Word-level tokenizer with counts, see `CtxWordTokenizer`."""
