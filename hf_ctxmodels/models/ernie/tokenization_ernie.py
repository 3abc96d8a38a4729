"""WordPiece tokenizer of ERNIE (Sun et al. 2019, section 4.1)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxErnieTokenizer(WordPieceTokenizer):
    """Tokenizer of ERNIE: BERT's WordPiece, with one token per Chinese character. See `WordPieceTokenizer` for
    arguments, training and errors."""
