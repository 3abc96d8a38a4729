"""Tokenizer of LASER."""

from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer
from hf_ctxmodels.tokenizers.moses import MosesTokenizer


class CtxLaserTokenizer(MosesTokenizer, JointBPETokenizer):
    """Joint BPE of all languages; see `JointBPETokenizer` for arguments, training and errors.

    With `moses_language`, text is split into words as in the released code. Chinese and Japanese must be split
    beforehand, and Greek be romanized. See `MosesTokenizer`.
    """
