"""XLM-R configuration (Conneau et al. 2020, section 3 and appendix B)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig


@strict
class CtxXLMRobertaConfig(CtxRobertaConfig):
    """Configuration of XLM-R. See `CtxRobertaConfig` for the arguments."""

    model_type = "ctx-xlm-roberta"
    reference_model_types: ClassVar[tuple[str, ...]] = ("xlm-roberta",)

    vocab_size: int = 250002
