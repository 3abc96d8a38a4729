"""WordPiece tokenizer of BERT (Devlin et al. 2019, section 3)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxBertTokenizer(WordPieceTokenizer):
    """Tokenizer of BERT. See `WordPieceTokenizer` for arguments, training and errors.

    Produces the same ids as `transformers.BertTokenizer` on the same files.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxBertTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
