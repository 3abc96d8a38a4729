"""Tokenizer of LASER."""

from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer


class CtxLaserTokenizer(JointBPETokenizer):
    """Joint BPE of all languages; see `JointBPETokenizer` for arguments, training and errors."""
