"""Tokenizer of LASER: joint byte-pair encodings of all languages."""

from hf_ctxmodels.tokenizers.subwords import SubwordTokenizer


class CtxLaserTokenizer(SubwordTokenizer):
    """Subwords of all languages together; see `SubwordTokenizer` for arguments, training and errors."""
