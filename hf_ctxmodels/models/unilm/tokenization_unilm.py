"""WordPiece tokenizer of UniLM (Dong et al. 2019, section 2.1: BERT's cased vocabulary)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxUniLMTokenizer(WordPieceTokenizer):
    """Tokenizer of UniLM, the same as BERT's. See `WordPieceTokenizer` for arguments, training and errors."""
