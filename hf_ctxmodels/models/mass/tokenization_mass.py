"""BPE tokenizer of MASS for translation; the summarization model has BERT's."""

from hf_ctxmodels.models.xlm.tokenization_xlm import CtxXLMTokenizer


class CtxMassTokenizer(CtxXLMTokenizer):
    """Tokenizer of MASS: the joint BPE of all languages. See `CtxXLMTokenizer` for arguments, training and errors."""
