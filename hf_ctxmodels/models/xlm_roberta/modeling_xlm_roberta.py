"""XLM-R (Conneau et al. 2020, arXiv 1911.02116): RoBERTa's network without language embeddings, pretrained on text of a
hundred languages with one vocabulary."""

from hf_ctxmodels import heads
from hf_ctxmodels.models.roberta import modeling_roberta as roberta
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig


class CtxXLMRobertaPreTrainedModel(roberta.CtxRobertaPreTrainedModel):
    """Base class of the XLM-R models."""

    config: CtxXLMRobertaConfig
    reference_model_type = "xlm-roberta"


class CtxXLMRobertaModel(CtxXLMRobertaPreTrainedModel, roberta.CtxRobertaModel):
    """The XLM-R encoder without a head."""


class CtxXLMRobertaHeadModel(heads.HeadModel, CtxXLMRobertaPreTrainedModel):
    """Base class of the XLM-R models with a head."""

    encoder_class = CtxXLMRobertaModel


class CtxXLMRobertaForMaskedLM(heads.ForMaskedLM, CtxXLMRobertaHeadModel):
    """XLM-R with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = roberta.CtxRobertaForMaskedLM._tied_weights_keys
    transform_activation = roberta.CtxRobertaForMaskedLM.transform_activation


class CtxXLMRobertaForSequenceClassification(heads.ForSequenceClassification, CtxXLMRobertaHeadModel):
    """XLM-R with a classifier or regressor on the state of <s>: dense layer, tanh and linear layer."""

    classifier_activation = "tanh"
    build_encoder = roberta.CtxRobertaForSequenceClassification.build_encoder


class CtxXLMRobertaForTokenClassification(heads.ForTokenClassification, CtxXLMRobertaHeadModel):
    """XLM-R with a token classifier."""


class CtxXLMRobertaForQuestionAnswering(heads.ForQuestionAnswering, CtxXLMRobertaHeadModel):
    """XLM-R with a span classifier for extractive question answering."""


class CtxXLMRobertaForMultipleChoice(heads.ForMultipleChoice, CtxXLMRobertaHeadModel):
    """XLM-R with a multiple-choice classifier."""
