"""BERT configuration (Devlin et al. 2019, section 3 and appendix A.2)."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_transformer import CtxEncoderConfig


@strict
class CtxBertConfig(CtxEncoderConfig):
    """Shape and regularisation of a BERT encoder; the defaults are BERT-base, uncased.

    Args: those of `CtxEncoderConfig`, and
        classifier_dropout: Dropout before the task heads; `None` means `hidden_dropout_prob`.
    """

    model_type = "ctx-bert"

    classifier_dropout: float | int | None = None
