"""Tokenizer of CoVe: words of the source and the target language in separate vocabularies."""

from hf_ctxmodels.tokenizers.translation import CtxTranslationTokenizer


class CtxCoveTokenizer(CtxTranslationTokenizer):
    """Words of two languages, see `CtxTranslationTokenizer`."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
