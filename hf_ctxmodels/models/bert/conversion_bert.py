"""BERT weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.conversion_ops import LEGACY_NORM_NAMES, FirstFound

_RENAMINGS = [
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"encoder\.layer\.", r"layers."),
    WeightRenaming(r"attention\.output\.dense\.", r"attention.out_proj."),
    WeightRenaming(r"attention\.output\.LayerNorm\.", r"attention_norm."),
    WeightRenaming(r"intermediate\.dense\.", r"feed_forward.up_proj."),
    WeightRenaming(r"output\.dense\.", r"feed_forward.down_proj."),
    WeightRenaming(r"output\.LayerNorm\.", r"feed_forward_norm."),
    WeightRenaming(r"cls\.predictions\.transform\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"cls\.predictions\.transform\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"cls\.predictions\.decoder\.weight", r"mlm_head.decoder.weight"),
    WeightRenaming(r"cls\.seq_relationship\.", r"nsp_head."),
]
# The reference decodes with decoder.bias; files of tied models may hold it under its other name alone.
_DECODER_BIAS = WeightConverter(
    ["cls.predictions.decoder.bias", "cls.predictions.bias"], "mlm_head.decoder.bias", [FirstFound()]
)
_FUSED = [
    WeightConverter(
        [f"attention.self.{part}.{kind}" for part in ("query", "key", "value")],
        f"attention.qkv_proj.{kind}",
        [Concatenate(dim=0)],
    )
    for kind in ("weight", "bias")
]

BERT_EXPORT: list[WeightTransform] = [*_RENAMINGS, *_FUSED, _DECODER_BIAS]
BERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_NAMES, *BERT_EXPORT]
