"""BERT configuration (Devlin et al. 2019, section 3 and appendix A.2)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig
from hf_ctxmodels.models.bert.distilbert import distilbert_to_bert_fields


@strict
class CtxBertConfig(CtxEncoderConfig):
    """Configuration of BERT; the defaults are BERT-base, uncased. See `CtxEncoderConfig` for the other arguments.

    Args:
        classifier_dropout: Dropout before the task heads; `None` means `hidden_dropout_prob`.
    """

    model_type = "ctx-bert"

    classifier_dropout: float | int | None = None

    extra_reference_model_types: ClassVar[tuple[str, ...]] = ("distilbert",)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json; the fields of a DistilBERT are converted."""
        fields, unused = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") in cls.extra_reference_model_types:
            fields = distilbert_to_bert_fields(fields)
        return fields, unused
