"""GPT weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import decoder_layers

GPT_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"gpt."),
    WeightRenaming(r"tokens_embed\.", r"word_embeddings."),
    WeightRenaming(r"positions_embed\.", r"position_embeddings."),
    *decoder_layers(),
]
GPT_SEQUENCE_EXPORT: list[WeightTransform] = [WeightRenaming(r"^score\.", r"classifier."), *GPT_EXPORT]
GPT_CHOICE_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^multiple_choice_head\.summary\.", r"classifier."),
    *GPT_EXPORT,
]
GPT_CONVERSION: list[WeightTransform] = [*GPT_CHOICE_EXPORT[:1], *GPT_SEQUENCE_EXPORT]
