"""Weight conversion of BART between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import FirstAvailable, RearrangeHeads, fused_projections

_LAYERS: list[WeightTransform] = [
    WeightRenaming(r"^model\.", r"bart\."),
    WeightRenaming(r"embed_positions\.", r"position_embeddings\."),
    WeightRenaming(r"layernorm_embedding\.", r"embedding_norm\."),
    WeightRenaming(r"\.self_attn\.out_proj\.", r"\.attention\.out_proj\."),
    WeightRenaming(r"\.self_attn_layer_norm\.", r"\.attention_norm\."),
    WeightRenaming(r"\.encoder_attn\.q_proj\.", r"\.cross_attention\.q_proj\."),
    WeightRenaming(r"\.encoder_attn\.out_proj\.", r"\.cross_attention\.out_proj\."),
    WeightRenaming(r"\.encoder_attn_layer_norm\.", r"\.cross_attention_norm\."),
    WeightRenaming(r"\.fc1\.", r"\.feed_forward\.up_proj\."),
    WeightRenaming(r"\.fc2\.", r"\.feed_forward\.down_proj\."),
    WeightRenaming(r"\.final_layer_norm\.", r"\.feed_forward_norm\."),
    WeightRenaming(r"^classification_head\.", r"classifier\."),
    *fused_projections("self_attn", ("q_proj", "k_proj", "v_proj")),
    *fused_projections("encoder_attn", ("k_proj", "v_proj"), "cross_attention.kv_proj"),
    WeightConverter(
        "final_logits_bias",
        "lm_head.bias",
        [RearrangeHeads(lambda tensor, heads: tensor[0], lambda tensor, heads: tensor[None])],
    ),
]
# the embedding matrices in transformers
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "shared.weight")
# For word embeddings tied to the output layer (BART_EXPORT), shared by encoder and decoder only (BART_UNTIED_EXPORT),
# and separate for encoder and decoder, where `shared` of transformers is unused (BART_CONVERSION).
BART_EXPORT: list[WeightTransform] = [*_LAYERS, WeightRenaming(r"shared\.", r"encoder\.word_embeddings\.")]
BART_UNTIED_EXPORT: list[WeightTransform] = [
    *_LAYERS,
    WeightConverter([*_EMBEDDINGS], "encoder.word_embeddings.weight", [FirstAvailable()]),
]
BART_CONVERSION: list[WeightTransform] = [
    *_LAYERS,
    WeightRenaming(r"decoder\.embed_tokens\.", r"decoder\.word_embeddings\."),
    WeightConverter([_EMBEDDINGS[0], _EMBEDDINGS[2]], "encoder.word_embeddings.weight", [FirstAvailable()]),
]
