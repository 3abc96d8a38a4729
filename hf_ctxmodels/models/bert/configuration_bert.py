"""BERT configuration (Devlin et al. 2019, section 3 and appendix A.2), and its conversion from and to DistilBERT's."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig

# DistilBERT (Sanh et al. 2019, arXiv 1910.01108) is BERT without segment embeddings: a `CtxBertConfig` with
# `type_vocab_size=0`. Its encoder has no pooler; its classifiers have one with a ReLU.
# Field of `CtxBertConfig` -> field of transformers' DistilBertConfig:
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
# class with a counterpart among transformers' DistilBERT classes -> whether this counterpart has a pooler
_DISTILBERT_POOLERS = {
    "CtxBertModel": False,
    "CtxBertForMaskedLM": False,
    "CtxBertForTokenClassification": False,
    "CtxBertForQuestionAnswering": False,
    "CtxBertForSequenceClassification": True,
    "CtxBertForMultipleChoice": True,
}


@strict
class CtxBertConfig(CtxEncoderConfig):
    """Configuration of BERT; the defaults are BERT-base, uncased. See `CtxEncoderConfig` for the other arguments.

    Args:
        convolutional_initialization: Initialize the heads of the first layer so that they attend to neighboring tokens,
            see `layers.attention.convolutional_initialization`; for small models with few training steps.
        classifier_dropout: Dropout rate before a task head; None for `hidden_dropout_prob`.
        pooler_act: Activation of the pooler: "tanh", or "relu" in a DistilBERT, which has no segment embeddings.
    """

    model_type = "ctx-bert"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert", "distilbert")

    convolutional_initialization: bool = False
    classifier_dropout: float | int | None = None
    pooler_act: Literal["tanh", "relu"] = "tanh"

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxEncoderConfig.non_reference_fields,
        "convolutional_initialization",
        "pooler_act",
    )

    def validate_pooler(self) -> None:
        """Check that only a model without segment embeddings has a pooler with a ReLU (called at construction)."""
        if self.pooler_act != "tanh" and self.type_vocab_size:
            raise ValueError(
                f"pooler_act={self.pooler_act!r} with type_vocab_size={self.type_vocab_size}: only a DistilBERT, with "
                "type_vocab_size=0, has this activation."
            )

    @classmethod
    def convert_reference_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of a DistilBERT."""
        return distilbert_to_bert_fields(fields) if fields["model_type"] == "distilbert" else fields


def distilbert_to_bert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a DistilBERT's config.json to fields of `CtxBertConfig`."""
    converted = {name: fields[old] for name, old in _FIELD_NAMES.items() if old in fields}
    common = {name: value for name, value in fields.items() if name in _COMMON_FIELDS}
    fixed = {"type_vocab_size": 0, "layer_norm_eps": _LAYER_NORM_EPS, "pooler_act": "relu", "model_type": "ctx-bert"}
    return {**_DEFAULTS, **converted, **common, **fixed, "classifier_dropout": _distilbert_head_dropout(fields)}


def _distilbert_head_dropout(fields: Mapping[str, Any]) -> float | None:
    """Dropout rate before the head of a DistilBERT; None for the encoder's rate, which its token classifier has."""
    architecture = next(iter(fields.get("architectures") or ()), "")
    if architecture.endswith("ForTokenClassification"):
        return None
    if architecture.endswith("ForQuestionAnswering"):
        return fields.get("qa_dropout", 0.1)
    return fields.get("seq_classif_dropout", 0.2)


def has_distilbert_class(config: PreTrainedConfig, model_class: str, has_pooler: bool) -> bool:
    """Whether transformers has a DistilBERT class with the outputs of a model."""
    is_distilbert = not config.type_vocab_size and config.layer_norm_eps == _LAYER_NORM_EPS
    has_equal_pooler = not has_pooler or config.pooler_act == "relu"
    return is_distilbert and has_equal_pooler and _DISTILBERT_POOLERS.get(model_class) is has_pooler


def bert_to_distilbert_fields(config: PreTrainedConfig, model_class: str) -> dict[str, Any]:
    """Convert the configuration of a model with a DistilBERT class to the fields of a DistilBERT's config.json."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name in _COMMON_FIELDS}
    fields |= {old: getattr(config, name) for name, old in _FIELD_NAMES.items()}
    fields |= {"seq_classif_dropout": config.head_dropout, "qa_dropout": config.head_dropout}
    architecture = model_class.replace("CtxBert", "DistilBert")
    return {**fields, "model_type": "distilbert", "architectures": [architecture]}
