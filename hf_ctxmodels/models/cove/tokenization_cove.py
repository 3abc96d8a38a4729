"""Word tokenizer of CoVe, with separate source and target vocabularies."""

from hf_ctxmodels.tokenizers.word_level import CtxTranslationTokenizer


class CtxCoveTokenizer(CtxTranslationTokenizer):
    """Source and target words, see `CtxTranslationTokenizer`."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
