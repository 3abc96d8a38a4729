"""Weight conversion of T5 between the layout of transformers and the native layout."""

from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import FirstAvailable, fused_projections

_PLAIN = {"wi": "up_proj", "wo": "down_proj"}
_GATED = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}

# transformers numbers the sub-layers; the feed-forward layer is the second in the encoder, the third in the decoder
_SUBLAYERS: list[WeightTransform] = [
    WeightRenaming(r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"position_bias\.buckets\."),
    WeightRenaming(  # of UMT5
        r"block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"layer_position_biases\.\1\.buckets\."
    ),
    WeightRenaming(r"encoder\.block\.(\d+)\.layer\.0\.", r"encoder\.layers\.\1\.self_attention_sublayer\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.0\.", r"decoder\.layers\.\1\.self_attention_sublayer\."),
    WeightRenaming(r"encoder\.block\.(\d+)\.layer\.1\.", r"encoder\.layers\.\1\.feed_forward_sublayer\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.1\.", r"decoder\.layers\.\1\.cross_attention_sublayer\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.2\.", r"decoder\.layers\.\1\.feed_forward_sublayer\."),
    WeightRenaming(r"self_attention_sublayer\.layer_norm\.", r"attention_norm\."),
    WeightRenaming(r"self_attention_sublayer\.SelfAttention\.o\.", r"attention\.out_proj\."),
    WeightRenaming(r"cross_attention_sublayer\.layer_norm\.", r"cross_attention_norm\."),
    WeightRenaming(r"cross_attention_sublayer\.EncDecAttention\.q\.", r"cross_attention\.q_proj\."),
    WeightRenaming(r"cross_attention_sublayer\.EncDecAttention\.o\.", r"cross_attention\.out_proj\."),
    WeightRenaming(r"feed_forward_sublayer\.layer_norm\.", r"feed_forward_norm\."),
    WeightRenaming(r"final_layer_norm\.", r"final_norm\."),
    WeightRenaming(r"classification_head\.(dense|out_proj)\.", r"classifier\.\1\."),
    *fused_projections("self_attention_sublayer.SelfAttention", "qkv", parameters=["weight"]),
    *fused_projections(
        "cross_attention_sublayer.EncDecAttention", "kv", "cross_attention.kv_proj", parameters=["weight"]
    ),
]


def _feed_forward(names: dict[str, str]) -> list[WeightTransform]:
    return [
        WeightRenaming(rf"feed_forward_sublayer\.DenseReluDense\.{old}\.", rf"feed_forward\.{new}\.")
        for old, new in names.items()
    ]


def build_export_conversion(*, gated: bool, prefixed: bool) -> list[WeightTransform]:
    """The invertible weight conversion of a model with `gated` feed-forward layers, whose encoder and decoder are, if
    `prefixed`, in a submodule `transformer` of the class of transformers."""
    prefix = (
        WeightRenaming(r"^transformer\.", r"t5\.")
        if prefixed
        else WeightRenaming(r"^(encoder|decoder|shared)\.", r"^t5\.\1\.")
    )
    words = WeightRenaming(r"shared\.", r"encoder\.word_embeddings\.")
    return [prefix, words, *_SUBLAYERS, *_feed_forward(_GATED if gated else _PLAIN)]


# for loading: all classes, and the copies of the word embeddings in old checkpoints
T5_CONVERSION: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"t5\."),
    *_SUBLAYERS,
    *_feed_forward(_PLAIN | _GATED),
    WeightConverter(
        ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
        "encoder.word_embeddings.weight",
        [FirstAvailable()],
    ),
]
