"""Weight conversion of GPT-2 between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import GPTConversions, decoder_layers

GPT2_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"gpt2."),
    WeightRenaming(r"wte\.", r"word_embeddings."),
    WeightRenaming(r"wpe\.", r"position_embeddings."),
    WeightRenaming(r"ln_f\.", r"final_norm."),
    *decoder_layers(),
]
GPT2_SEQUENCE_EXPORT, GPT2_CHOICE_EXPORT, GPT2_CONVERSION = GPTConversions.from_export(GPT2_EXPORT)
