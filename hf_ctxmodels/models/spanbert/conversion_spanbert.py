"""Weight conversion of SpanBERT: BERT's layout, and the released span boundary head, to the native layout."""

from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION

_HEAD = r"cls\.pair_target_predictions\."
_LAYERS = {
    r"mlp_layer_norm\.linear1\.": "first_dense.",
    r"mlp_layer_norm\.layer_norm1\.": "first_norm.",
    r"mlp_layer_norm\.linear2\.": "second_dense.",
    r"mlp_layer_norm\.layer_norm2\.": "second_norm.",
    r"position_embeddings\.": "position_embeddings.",
    r"decoder\.weight": "decoder.weight",
    r"bias": "decoder.bias",
}
SPANBERT_CONVERSION: list[WeightTransform] = [
    WeightRenaming(r"^decoder\.(bert|cls)\.", r"\1."),  # prefix of fairseq's pretraining checkpoints
    WeightRenaming(r"(layer_norm[12])\.gamma", r"\1.weight"),
    WeightRenaming(r"(layer_norm[12])\.beta", r"\1.bias"),
    *(WeightRenaming(_HEAD + released_name, f"sbo_head.{name}") for released_name, name in _LAYERS.items()),
    *BERT_CONVERSION,
]
