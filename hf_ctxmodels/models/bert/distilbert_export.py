"""Export to DistilBERT's classes in transformers (Sanh et al. 2019, arXiv 1910.01108)."""

from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.distilbert import EPSILON, FIELDS

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
    if config.layer_norm_eps != EPSILON:
        raise CtxError(
            f"DistilBERT has layer_norm_eps={EPSILON}, this model {config.layer_norm_eps}.",
            hint="use save_pretrained.",
        )
    values = {name: getattr(config, own) for own, name in FIELDS.items()}
    return {**values, "model_type": "distilbert", "architectures": [_ARCHITECTURES[model_class]]}
