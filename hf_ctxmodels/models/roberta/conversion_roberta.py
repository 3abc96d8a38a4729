"""Weight conversion of RoBERTa between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import LEGACY_NORM_RENAMINGS, POST_NORM_RENAMINGS, decoder_bias, fused_projections

ROBERTA_EXPORT: list[WeightTransform] = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"^lm_head\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"^lm_head\.layer_norm\.", r"mlm_head.norm."),
    WeightRenaming(r"^lm_head\.decoder\.weight", r"mlm_head.decoder.weight"),
    *fused_projections("attention.self"),
    decoder_bias("^lm_head"),
]
ROBERTA_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *ROBERTA_EXPORT]
