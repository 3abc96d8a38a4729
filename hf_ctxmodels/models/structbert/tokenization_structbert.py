"""WordPiece tokenizer of StructBERT (Wang et al. 2019, section 3.1: BERT's vocabulary)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxStructBertTokenizer(WordPieceTokenizer):
    """Tokenizer of StructBERT, the same as BERT's. See `WordPieceTokenizer` for arguments, training and errors.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxStructBertTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
