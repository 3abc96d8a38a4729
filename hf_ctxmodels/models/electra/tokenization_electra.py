"""WordPiece tokenizer of ELECTRA (Clark et al. 2020, section 3.1: BERT's vocabulary and input)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxElectraTokenizer(WordPieceTokenizer):
    """Tokenizer of ELECTRA, the same as BERT's, for generator and discriminator. See `WordPieceTokenizer` for
    arguments, training and errors.

    Produces the same ids as `transformers.ElectraTokenizer` on the same files.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxElectraTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """
