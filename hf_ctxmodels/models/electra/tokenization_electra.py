"""WordPiece tokenizer of ELECTRA (Clark et al. 2020, section 3.1: BERT's vocabulary and input)."""

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxElectraTokenizer(WordPieceTokenizer):
    """Tokenizer of ELECTRA, the same as BERT's, for generator and discriminator. See `WordPieceTokenizer` for
    arguments, training and errors.

    Produces the same ids as `transformers.ElectraTokenizer` on the same files.
    """
