"""Weight conversion of ALBERT between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import LEGACY_NORM_RENAMINGS, decoder_bias, fused_projections

_RENAMINGS = [
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"encoder\.embedding_hidden_mapping_in\.", r"embeddings.projection."),
    WeightRenaming(r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.", r"layers.\1."),
    WeightRenaming(r"attention\.dense\.", r"attention.out_proj."),
    WeightRenaming(r"attention\.LayerNorm\.", r"attention_norm."),
    WeightRenaming(r"ffn\.", r"feed_forward.up_proj."),
    WeightRenaming(r"ffn_output\.", r"feed_forward.down_proj."),
    WeightRenaming(r"full_layer_layer_norm\.", r"feed_forward_norm."),
    WeightRenaming(r"pooler\.weight", r"pooler.dense.weight"),
    WeightRenaming(r"pooler\.bias", r"pooler.dense.bias"),
    WeightRenaming(r"predictions\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"predictions\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"predictions\.decoder\.weight", r"mlm_head.decoder.weight"),
    WeightRenaming(r"sop_classifier\.classifier\.", r"sop_head."),
]
ALBERT_EXPORT: list[WeightTransform] = [*_RENAMINGS, *fused_projections("attention"), decoder_bias("predictions")]
ALBERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *ALBERT_EXPORT]
