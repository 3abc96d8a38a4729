"""Byte-level BPE tokenizer of BART (Lewis et al. 2020, section 5.1)."""

from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer


class CtxBartTokenizer(CtxRobertaTokenizer):
    """Tokenizer of BART, the same as RoBERTa's; it produces the same ids as `transformers.BartTokenizer`."""
