"""GPT-2 weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming, WeightTransform

# The reference keeps the weights of its linear maps as (in, out).
_PROJECTIONS = {
    "attn.c_attn": "attention.qkv_proj",
    "attn.c_proj": "attention.out_proj",
    "mlp.c_fc": "feed_forward.up_proj",
    "mlp.c_proj": "feed_forward.down_proj",
}

GPT2_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"gpt2."),
    WeightRenaming(r"wte\.", r"word_embeddings."),
    WeightRenaming(r"wpe\.", r"position_embeddings."),
    WeightRenaming(r"ln_f\.", r"final_norm."),
    WeightRenaming(r"h\.", r"layers."),
    WeightRenaming(r"ln_1\.", r"attention_norm."),
    WeightRenaming(r"ln_2\.", r"feed_forward_norm."),
    *(WeightConverter(f"{old}.weight", f"{new}.weight", [Transpose()]) for old, new in _PROJECTIONS.items()),
    *(WeightRenaming(f"{old}.bias", f"{new}.bias") for old, new in _PROJECTIONS.items()),
]
# Of the sequence head alone: its classifier has another name than that of the token head.
GPT2_SEQUENCE_EXPORT: list[WeightTransform] = [WeightRenaming(r"^score\.", r"classifier."), *GPT2_EXPORT]
GPT2_CHOICE_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^multiple_choice_head\.summary\.", r"classifier."),
    *GPT2_EXPORT,
]
GPT2_CONVERSION: list[WeightTransform] = [*GPT2_CHOICE_EXPORT[:1], *GPT2_SEQUENCE_EXPORT]
