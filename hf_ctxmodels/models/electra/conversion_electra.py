"""Weight conversion of ELECTRA between the layout of transformers and the native layout.

Generator and discriminator are separate models in transformers. In a joint checkpoint the generator's names start with
`generator.`, which no pattern matches.
"""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import POST_NORM_RENAMINGS, fused_projections

ELECTRA_CONVERSION: list[WeightTransform] = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"embeddings_project\.", r"embeddings.projection."),
    WeightRenaming(r"discriminator_predictions\.dense\.", r"rtd_head.dense."),
    WeightRenaming(r"discriminator_predictions\.dense_prediction\.", r"rtd_head.out_proj."),
    WeightRenaming(r"generator_predictions\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"generator_predictions\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"generator_lm_head\.", r"mlm_head.decoder."),
    *fused_projections("attention.self"),
]
