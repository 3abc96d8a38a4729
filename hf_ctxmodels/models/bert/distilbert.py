"""DistilBERT's configuration in transformers (Sanh et al. 2019, arXiv 1910.01108), and BERT's that says the same.

DistilBERT is BERT without segment embeddings and pooler. It is no family here: a `CtxBertConfig` with
`type_vocab_size=0` says the same, and every head, objective and script takes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_ctxmodels.core.errors import CtxError

FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    **{name: name for name in ("vocab_size", "max_position_embeddings", "initializer_range", "pad_token_id")},
    "tie_word_embeddings": "tie_word_embeddings",
}
EPSILON = 1e-12
"""Of every LayerNorm there; no field says so."""
_KEPT = {"architectures", "id2label", "label2id", "problem_type", "torch_dtype", "dtype", "_commit_hash"}
# fields that a file need not have, as released; transformers' defaults are those of `CtxBertConfig` but for the depth
_DEFAULTS = {"num_hidden_layers": 6}
_POOLED = {"DistilBertForSequenceClassification", "DistilBertForMultipleChoice"}


def distilbert_to_bert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `CtxBertConfig` that is the DistilBERT of a config.json."""
    own = {name: fields[theirs] for name, theirs in FIELDS.items() if theirs in fields}
    kept = {name: value for name, value in fields.items() if name in _KEPT}
    fixed = {"type_vocab_size": 0, "layer_norm_eps": EPSILON, "model_type": "ctx-bert"}
    return {**_DEFAULTS, **own, **kept, **fixed}


def reject_distilbert_head(model_class: str, architectures: Sequence[str] | None) -> None:
    """Raise CtxError for a head on the pooler where a checkpoint has DistilBERT's, which has a ReLU for BERT's tanh.

    Args:
        model_class: Name of the class that is made.
        architectures: Of its configuration.
    """
    if found := _POOLED.intersection(architectures or ()):
        raise CtxError(
            f"The head of {min(found)} has a dense layer with a ReLU, {model_class} one with a tanh: its weights would "
            "make another function.",
            location=model_class,
            hint="open the encoder alone by CtxBertModel, with add_pooling_layer=False, and train a head anew; or stay "
            "with transformers' class.",
        )
