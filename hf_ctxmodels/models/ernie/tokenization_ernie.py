"""WordPiece tokenizer of ERNIE."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxErnieTokenizer(WordPieceTokenizer):
    """ERNIE's tokenizer, BERT's WordPiece, which makes every Chinese character a token; see `WordPieceTokenizer`."""
