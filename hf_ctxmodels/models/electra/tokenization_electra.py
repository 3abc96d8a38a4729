"""WordPiece tokenizer of ELECTRA (Clark et al. 2020, section 3.1: BERT's vocabulary and input)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxElectraTokenizer(WordPieceTokenizer):
    """ELECTRA's tokenizer, which is BERT's; see `WordPieceTokenizer` for arguments, training and errors.

    Gives the ids of `transformers.ElectraTokenizer` on the same files. Generator and discriminator share one.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxElectraTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
