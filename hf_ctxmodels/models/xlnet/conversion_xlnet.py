"""Weight conversion of XLNet between the layout of transformers and the native layout."""

from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import RearrangeHeads

_MERGE_OUTPUT_HEADS = RearrangeHeads(
    lambda tensor, heads: tensor.flatten(1).T.contiguous(),
    lambda tensor, heads: tensor.T.unflatten(1, (heads, -1)).contiguous(),
)
_MERGE_INPUT_HEADS = RearrangeHeads(
    lambda tensor, heads: tensor.flatten(1), lambda tensor, heads: tensor.unflatten(1, (heads, -1))
)
XLNET_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"xlnet."),
    WeightRenaming(r"word_embedding\.", r"word_embeddings."),
    WeightRenaming(r"mask_emb", r"mask_embedding"),
    WeightRenaming(r"layer\.", r"layers."),
    WeightRenaming(r"rel_attn\.layer_norm\.", r"attention_norm."),
    WeightRenaming(r"ff\.layer_1\.", r"feed_forward.up_proj."),
    WeightRenaming(r"ff\.layer_2\.", r"feed_forward.down_proj."),
    WeightRenaming(r"ff\.layer_norm\.", r"feed_forward_norm."),
    WeightRenaming(r"rel_attn\.r_w_bias", r"attention.content_bias"),
    WeightRenaming(r"rel_attn\.r_r_bias", r"attention.position_bias"),
    WeightRenaming(r"rel_attn\.r_s_bias", r"attention.segment_bias"),
    WeightRenaming(r"rel_attn\.seg_embed", r"attention.segment_embeddings"),
    WeightRenaming(r"lm_loss\.", r"lm_head."),
    WeightRenaming(r"end_logits\.LayerNorm\.", r"end_logits.norm."),
    # transformers stores (hidden, heads, head_dim), a linear layer (out, in)
    WeightConverter(
        [f"rel_attn.{name}" for name in "qkv"],
        "attention.qkv_proj.weight",
        [_MERGE_OUTPUT_HEADS, Concatenate(dim=0)],
    ),
    WeightConverter("rel_attn.r", "attention.position_proj.weight", [_MERGE_OUTPUT_HEADS]),
    WeightConverter("rel_attn.o", "attention.out_proj.weight", [_MERGE_INPUT_HEADS]),
]
# the classifier of the sequence and choice heads is `logits_proj` in transformers
XLNET_CONVERSION: list[WeightTransform] = [
    WeightRenaming(r"sequence_summary\.summary\.", r"summary.dense."),
    WeightRenaming(r"logits_proj\.", r"classifier."),
    *XLNET_EXPORT,
]
