"""StructBERT configuration (Wang et al. 2019, section 3.1)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig


@strict
class CtxStructBertConfig(CtxBertConfig):
    """Configuration of StructBERT; the defaults are the base model, uncased. See `CtxBertConfig` for the arguments."""

    model_type = "ctx-structbert"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bert",)
