"""WordPiece tokenizer of StructBERT (Wang et al. 2019, section 3.1: BERT's vocabulary)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxStructBertTokenizer(WordPieceTokenizer):
    """Tokenizer of StructBERT, the same as BERT's. See `WordPieceTokenizer` for arguments, training and errors."""
