"""BERT configuration (Devlin et al. 2019, section 3 and appendix A.2), and its conversion from and to DistilBERT's."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig
from hf_ctxmodels.core.errors import CtxError

# DistilBERT (Sanh et al. 2019, arXiv 1910.01108) is BERT without segment embeddings and pooler: a `CtxBertConfig` with
# `type_vocab_size=0`. Field of `CtxBertConfig` -> field of transformers' DistilBertConfig:
_FIELD_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
    "tie_word_embeddings": "tie_word_embeddings",
}
_LAYER_NORM_EPS = 1e-12  # fixed in transformers
_COMMON_FIELDS = {"architectures", "id2label", "label2id", "problem_type", "torch_dtype", "dtype", "_commit_hash"}
_DEFAULTS = {"num_hidden_layers": 6}  # the only default of DistilBertConfig that differs from `CtxBertConfig`
_POOLER_HEADS = {"DistilBertForSequenceClassification", "DistilBertForMultipleChoice"}
_EXPORTED_CLASSES = {
    "CtxBertModel": "DistilBertModel",
    "CtxBertForMaskedLM": "DistilBertForMaskedLM",
    "CtxBertForTokenClassification": "DistilBertForTokenClassification",
    "CtxBertForQuestionAnswering": "DistilBertForQuestionAnswering",
}


@strict
class CtxBertConfig(CtxEncoderConfig):
    """Configuration of BERT; the defaults are BERT-base, uncased. See `CtxEncoderConfig` for the arguments."""

    model_type = "ctx-bert"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert", "distilbert")

    classifier_dropout: float | int | None = None

    @classmethod
    def convert_reference_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of a DistilBERT."""
        return distilbert_to_bert_fields(fields) if fields["model_type"] == "distilbert" else fields


def distilbert_to_bert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a DistilBERT's config.json to fields of `CtxBertConfig`."""
    converted = {name: fields[old] for name, old in _FIELD_NAMES.items() if old in fields}
    common = {name: value for name, value in fields.items() if name in _COMMON_FIELDS}
    fixed = {"type_vocab_size": 0, "layer_norm_eps": _LAYER_NORM_EPS, "model_type": "ctx-bert"}
    return {**_DEFAULTS, **converted, **common, **fixed}


def has_distilbert_layout(config: PreTrainedConfig, model_class: str, has_pooler: bool) -> bool:
    """Whether transformers' DistilBERT has a class with the outputs of this model."""
    has_class = model_class in _EXPORTED_CLASSES and not has_pooler
    return has_class and not config.type_vocab_size and config.layer_norm_eps == _LAYER_NORM_EPS


def bert_to_distilbert_fields(config: PreTrainedConfig, model_class: str) -> dict[str, Any]:
    """Convert the configuration of a model with `has_distilbert_layout` to the fields of a DistilBERT's config.json."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name in _COMMON_FIELDS}
    fields |= {old: getattr(config, name) for name, old in _FIELD_NAMES.items()}
    return {**fields, "model_type": "distilbert", "architectures": [_EXPORTED_CLASSES[model_class]]}


def reject_distilbert_head(model_class: str, architectures: Sequence[str] | None) -> None:
    """Raise CtxError for a head on DistilBERT's pooled state, whose dense layer has a ReLU, not a tanh."""
    if heads := _POOLER_HEADS.intersection(architectures or ()):
        raise CtxError(
            f"The head of {min(heads)} has a dense layer with ReLU, but {model_class} uses tanh, so the outputs "
            "would differ.",
            location=model_class,
            hint="load the encoder with CtxBertModel and add_pooling_layer=False and train a new head, or use the "
            "class of transformers.",
        )
