"""WordPiece tokenizer of UniLM (Dong et al. 2019, section 2.1: BERT's cased vocabulary)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxUniLMTokenizer(WordPieceTokenizer):
    """Tokenizer of UniLM, the same as BERT's. See `WordPieceTokenizer` for arguments, training and errors.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxUniLMTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
