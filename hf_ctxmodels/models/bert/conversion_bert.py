"""BERT weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import LEGACY_NORM_NAMES, POST_NORM_RENAMINGS, decoder_bias, fused_projections

_RENAMINGS = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"cls\.predictions\.transform\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"cls\.predictions\.transform\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"cls\.predictions\.decoder\.weight", r"mlm_head.decoder.weight"),
    WeightRenaming(r"cls\.seq_relationship\.", r"nsp_head."),
]
BERT_EXPORT: list[WeightTransform] = [
    *_RENAMINGS,
    *fused_projections("attention.self"),
    decoder_bias("cls.predictions"),
]
BERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_NAMES, *BERT_EXPORT]
