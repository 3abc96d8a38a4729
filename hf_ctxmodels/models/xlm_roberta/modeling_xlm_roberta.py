"""XLM-R (Conneau et al. 2020, arXiv 1911.02116): RoBERTa's network without language embeddings, pretrained on text of a
hundred languages with one vocabulary."""

from hf_ctxmodels.models.roberta import modeling_roberta as roberta
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig


class CtxXLMRobertaPreTrainedModel(roberta.CtxRobertaPreTrainedModel):
    """XLM-R's part of the model base."""

    config: CtxXLMRobertaConfig
    reference_model_type = "xlm-roberta"


class CtxXLMRobertaModel(CtxXLMRobertaPreTrainedModel, roberta.CtxRobertaModel):
    """The encoder."""


class CtxXLMRobertaHeadModel(CtxXLMRobertaPreTrainedModel):
    """Binds RoBERTa's heads to XLM-R's encoder."""

    encoder_class = CtxXLMRobertaModel


class CtxXLMRobertaForMaskedLM(CtxXLMRobertaHeadModel, roberta.CtxRobertaForMaskedLM):
    """XLM-R with the masked-LM head; the decoder is tied to the word embeddings."""


class CtxXLMRobertaForSequenceClassification(CtxXLMRobertaHeadModel, roberta.CtxRobertaForSequenceClassification):
    """XLM-R with a classifier or regressor on the state of <s>."""


class CtxXLMRobertaForTokenClassification(CtxXLMRobertaHeadModel, roberta.CtxRobertaForTokenClassification):
    """XLM-R with a classifier of each token."""


class CtxXLMRobertaForQuestionAnswering(CtxXLMRobertaHeadModel, roberta.CtxRobertaForQuestionAnswering):
    """XLM-R with start and end logits of an answer span."""


class CtxXLMRobertaForMultipleChoice(CtxXLMRobertaHeadModel, roberta.CtxRobertaForMultipleChoice):
    """XLM-R with a logit for each of several choices."""
