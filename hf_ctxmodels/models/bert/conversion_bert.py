"""Weight conversion of BERT and DistilBERT between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import LEGACY_NORM_RENAMINGS, POST_NORM_RENAMINGS, decoder_bias, fused_projections

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
# DistilBERT (Sanh et al. 2019, arXiv 1910.01108): BERT without segment embeddings and pooler, under other names
DISTILBERT_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^distilbert\.", r"bert."),
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"transformer\.layer\.", r"layers."),
    WeightRenaming(r"attention\.out_lin\.", r"attention.out_proj."),
    WeightRenaming(r"sa_layer_norm\.", r"attention_norm."),
    WeightRenaming(r"ffn\.lin1\.", r"feed_forward.up_proj."),
    WeightRenaming(r"ffn\.lin2\.", r"feed_forward.down_proj."),
    WeightRenaming(r"output_layer_norm\.", r"feed_forward_norm."),
    WeightRenaming(r"^vocab_transform\.", r"mlm_head.dense."),
    WeightRenaming(r"^vocab_layer_norm\.", r"mlm_head.norm."),
    WeightRenaming(r"^vocab_projector\.", r"mlm_head.decoder."),
    *fused_projections("attention", ("q_lin", "k_lin", "v_lin")),
]

# the weight names of BERT and DistilBERT are disjoint, so one table loads both
BERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *BERT_EXPORT, *DISTILBERT_EXPORT]
