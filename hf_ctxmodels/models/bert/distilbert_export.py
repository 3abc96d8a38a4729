"""Export to DistilBERT's classes in transformers (Sanh et al. 2019, arXiv 1910.01108).

DistilBERT is BERT without segment embeddings and pooler. It is no family here: a `CtxBertConfig` with
`type_vocab_size=0` says the same, and every head, objective and script takes it.
"""

from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

_FIELDS = {
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
_EPSILON = 1e-12  # of every LayerNorm there; no field says so
_ARCHITECTURES = {"CtxBertModel": "DistilBertModel", "CtxBertForMaskedLM": "DistilBertForMaskedLM"}


def distilbert_config(config: CtxBertConfig, model_class: str, has_pooler: bool) -> dict[str, Any]:
    """The configuration of the DistilBERT with these weights.

    Args:
        config: With `type_vocab_size=0`.
        model_class: Name of the model's class.
        has_pooler: Whether the model has a pooler, whose weights DistilBERT has no place for.

    Raises:
        CtxError: transformers' DistilBERT lacks something of this model.
    """
    if model_class not in _ARCHITECTURES:
        raise CtxError(
            f"transformers' DistilBERT has another head than {model_class}.",
            hint="use save_pretrained; the encoder and the masked-LM model are exported.",
        )
    if has_pooler:
        raise CtxError("DistilBERT has no pooler.", hint="open the model with add_pooling_layer=False.")
    if config.layer_norm_eps != _EPSILON:
        raise CtxError(
            f"DistilBERT has layer_norm_eps={_EPSILON}, this model {config.layer_norm_eps}.",
            hint="use save_pretrained.",
        )
    values = {name: getattr(config, own) for own, name in _FIELDS.items()}
    return {**values, "model_type": "distilbert", "architectures": [_ARCHITECTURES[model_class]]}
