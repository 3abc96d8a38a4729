"""Weight conversion of GPT between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import GPTConversions, decoder_layers

GPT_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"gpt."),
    WeightRenaming(r"tokens_embed\.", r"word_embeddings."),
    WeightRenaming(r"positions_embed\.", r"position_embeddings."),
    *decoder_layers(),
]
GPT_SEQUENCE_EXPORT, GPT_CHOICE_EXPORT, GPT_CONVERSION = GPTConversions.from_export(GPT_EXPORT)
