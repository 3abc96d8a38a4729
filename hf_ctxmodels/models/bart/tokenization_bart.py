"""Byte-level BPE tokenizer of BART (Lewis et al. 2020, section 5.1)."""

from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer


class CtxBartTokenizer(CtxRobertaTokenizer):
    """Tokenizer of BART, the same as RoBERTa's; it produces the same ids as `transformers.BartTokenizer`.

    Example:
        >>> tokenizer = CtxBartTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=270)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        '<s>A cat sat.</s>'
    """
