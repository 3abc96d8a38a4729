"""Word tokenizer of word2vec."""

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxWord2VecTokenizer(CtxWordTokenizer):
    """Word-level tokenizer with counts, see `CtxWordTokenizer`."""
