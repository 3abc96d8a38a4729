"""Word tokenizer of the sequence auto-encoder."""

from hf_ctxmodels.tokenizers.words import CtxWrittenWordTokenizer


class CtxSeqaeTokenizer(CtxWrittenWordTokenizer):
    """Whole words that can be put together again, [EOS] behind each text, see `CtxWrittenWordTokenizer`."""
