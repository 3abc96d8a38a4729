"""Tokenizer of LASER: joint byte-pair encodings of all languages."""

from hf_ctxmodels.tokenizers.joint_bpe import JointBPETokenizer


class CtxLaserTokenizer(JointBPETokenizer):
    """Subwords of all languages together; see `JointBPETokenizer` for arguments, training and errors."""
