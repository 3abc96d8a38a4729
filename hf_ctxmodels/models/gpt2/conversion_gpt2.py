"""GPT-2 weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import decoder_layers

GPT2_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"gpt2."),
    WeightRenaming(r"wte\.", r"word_embeddings."),
    WeightRenaming(r"wpe\.", r"position_embeddings."),
    WeightRenaming(r"ln_f\.", r"final_norm."),
    *decoder_layers(),
]
# Of the sequence head alone: its classifier has another name than that of the token head.
GPT2_SEQUENCE_EXPORT: list[WeightTransform] = [WeightRenaming(r"^score\.", r"classifier."), *GPT2_EXPORT]
GPT2_CHOICE_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^multiple_choice_head\.summary\.", r"classifier."),
    *GPT2_EXPORT,
]
GPT2_CONVERSION: list[WeightTransform] = [*GPT2_CHOICE_EXPORT[:1], *GPT2_SEQUENCE_EXPORT]
