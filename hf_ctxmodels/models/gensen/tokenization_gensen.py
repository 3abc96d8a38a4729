"""Tokenizer of GenSen."""

from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer


class CtxGenSenTokenizer(JointBPETokenizer):
    """Joint BPE of sources and targets, see `JointBPETokenizer`; the second text has `token_type_ids` of 1."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
