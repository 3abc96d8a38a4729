"""Word tokenizer of word2vec."""

from hf_ctxmodels.tokenizers.words import CtxWordTokenizer


class CtxWord2VecTokenizer(CtxWordTokenizer):
    """Whole words with their counts, see `CtxWordTokenizer`."""
