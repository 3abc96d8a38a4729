"""WordPiece tokenizer of BERT (Devlin et al. 2019, section 3)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxBertTokenizer(WordPieceTokenizer):
    """BERT's tokenizer; see `WordPieceTokenizer` for arguments, training and errors.

    Gives the ids of `transformers.BertTokenizer` on the same files.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxBertTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
