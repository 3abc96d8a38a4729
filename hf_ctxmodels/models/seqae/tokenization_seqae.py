"""Word tokenizer of the sequence auto-encoder."""

from hf_ctxmodels.tokenizers.word_level import CtxReversibleWordTokenizer


class CtxSeqaeTokenizer(CtxReversibleWordTokenizer):
    """Word-level tokenizer with [EOS] after each text, see `CtxReversibleWordTokenizer`."""
