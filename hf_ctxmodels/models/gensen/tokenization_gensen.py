"""Tokenizer of GenSen: joint byte-pair encodings of one text or two."""

from hf_ctxmodels.tokenizers.joint_bpe import JointBPETokenizer


class CtxGenSenTokenizer(JointBPETokenizer):
    """Subwords of sources and targets, see `JointBPETokenizer`; a second text has `token_type_ids` of 1."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
