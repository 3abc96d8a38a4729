"""Tokenizer of LASER."""

from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer
from hf_ctxmodels.tokenizers.moses import MosesTokenizer


class CtxLaserTokenizer(MosesTokenizer, JointBPETokenizer):
    """Joint BPE of all languages; see `JointBPETokenizer` for arguments, training and errors.

    The tokenizer of a converted encoder has `moses_language="en"`: text is split into words as in the released code,
    see `MosesTokenizer`. Chinese, Japanese and Thai must be split beforehand, and Greek must be romanized.
    """
