"""T5 weight names: the reference layout of transformers -> the native layout here."""

from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.core.weights import FirstAvailable

_PLAIN = {"wi": "up_proj", "wo": "down_proj"}
_GATED = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}

# The reference numbers sub-layers; the feed-forward layer is the second of an encoder, the third of a decoder.
_SUB_LAYERS: list[WeightTransform] = [
    WeightRenaming(r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"position_bias\.buckets\."),
    WeightRenaming(r"encoder\.block\.(\d+)\.layer\.0\.", r"encoder\.layers\.\1\.reading\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.0\.", r"decoder\.layers\.\1\.reading\."),
    WeightRenaming(r"encoder\.block\.(\d+)\.layer\.1\.", r"encoder\.layers\.\1\.feeding\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.1\.", r"decoder\.layers\.\1\.crossing\."),
    WeightRenaming(r"decoder\.block\.(\d+)\.layer\.2\.", r"decoder\.layers\.\1\.feeding\."),
    WeightRenaming(r"reading\.layer_norm\.", r"attention_norm\."),
    WeightRenaming(r"reading\.SelfAttention\.o\.", r"attention\.out_proj\."),
    WeightRenaming(r"crossing\.layer_norm\.", r"cross_attention_norm\."),
    WeightRenaming(r"crossing\.EncDecAttention\.q\.", r"cross_attention\.q_proj\."),
    WeightRenaming(r"crossing\.EncDecAttention\.o\.", r"cross_attention\.out_proj\."),
    WeightRenaming(r"feeding\.layer_norm\.", r"feed_forward_norm\."),
    WeightRenaming(r"final_layer_norm\.", r"final_norm\."),
    WeightRenaming(r"classification_head\.(dense|out_proj)\.", r"classifier\.\1\."),
    WeightConverter(
        [f"reading.SelfAttention.{part}.weight" for part in "qkv"], "attention.qkv_proj.weight", [Concatenate(dim=0)]
    ),
    WeightConverter(
        [f"crossing.EncDecAttention.{part}.weight" for part in "kv"],
        "cross_attention.kv_proj.weight",
        [Concatenate(dim=0)],
    ),
]


def _feed_forward(names: dict[str, str]) -> list[WeightTransform]:
    return [
        WeightRenaming(rf"feeding\.DenseReluDense\.{old}\.", rf"feed_forward\.{new}\.") for old, new in names.items()
    ]


def build_export_conversion(*, gated: bool, prefixed: bool) -> list[WeightTransform]:
    """The invertible table of a model.

    Args:
        gated: Whether its feed-forward layers are.
        prefixed: Whether encoder and decoder are a part of the reference's class, as here, and not that class itself.
    """
    prefix = (
        WeightRenaming(r"^transformer\.", r"t5\.")
        if prefixed
        else WeightRenaming(r"^(encoder|decoder|shared)\.", r"^t5\.\1\.")
    )
    words = WeightRenaming(r"shared\.", r"encoder\.word_embeddings\.")
    return [prefix, words, *_SUB_LAYERS, *_feed_forward(_GATED if gated else _PLAIN)]


# What is read: every class, and the copies of the table of words in old files.
T5_CONVERSION: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"t5\."),
    *_SUB_LAYERS,
    *_feed_forward(_PLAIN | _GATED),
    WeightConverter(
        ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
        "encoder.word_embeddings.weight",
        [FirstAvailable()],
    ),
]
