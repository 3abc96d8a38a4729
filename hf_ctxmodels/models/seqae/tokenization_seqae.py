"""Word tokenizer of the sequence auto-encoder."""

from hf_ctxmodels.tokenizers.words import CtxWrittenWordTokenizer


class CtxSeqaeTokenizer(CtxWrittenWordTokenizer):
    """Whole words, [EOS] after each text, see `CtxWrittenWordTokenizer`."""
