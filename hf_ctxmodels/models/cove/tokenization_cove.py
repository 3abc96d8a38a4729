"""CoVe tokenizer: words of the source language, and words of the target language in a vocabulary of their own."""

from hf_ctxmodels.tokenizers.parallel import CtxTranslationTokenizer


class CtxCoveTokenizer(CtxTranslationTokenizer):
    """Words of two languages, see `CtxTranslationTokenizer`; those of the source language may be a static model's."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
