"""Weight conversion of XLM between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import fused_projections

XLM_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"xlm\."),
    WeightRenaming(r"(?<!_)embeddings\.", r"word_embeddings\."),
    WeightRenaming(r"lang_embeddings\.", r"language_embeddings\."),
    WeightRenaming(r"layer_norm_emb\.", r"embedding_norm\."),
    WeightRenaming(r"attentions\.(\d+)\.", r"layers\.\1\.attention\."),
    WeightRenaming(r"layer_norm1\.(\d+)\.", r"layers\.\1\.attention_norm\."),
    WeightRenaming(r"ffns\.(\d+)\.lin1\.", r"layers\.\1\.feed_forward\.up_proj\."),
    WeightRenaming(r"ffns\.(\d+)\.lin2\.", r"layers\.\1\.feed_forward\.down_proj\."),
    WeightRenaming(r"layer_norm2\.(\d+)\.", r"layers\.\1\.feed_forward_norm\."),
    WeightRenaming(r"out_lin\.", r"out_proj\."),
    WeightRenaming(r"pred_layer\.proj\.", r"lm_head\."),
    *fused_projections("attention", ("q_lin", "k_lin", "v_lin")),
]
# transformers names the classifier of sequence heads `sequence_summary.summary`; loading uses this table for all heads
XLM_SUMMARY_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^sequence_summary\.summary\.", r"classifier\."),
    *XLM_EXPORT,
]
XLM_CONVERSION: list[WeightTransform] = XLM_SUMMARY_EXPORT
