"""XLM-R (Conneau et al. 2020, arXiv 1911.02116): RoBERTa's network without language embeddings, pretrained on text of a
hundred languages with one vocabulary."""

from hf_ctxmodels import heads
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.models.roberta import modeling_roberta as roberta
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig


class CtxXLMRobertaPreTrainedModel(roberta.CtxRobertaPreTrainedModel):
    """Base class of the XLM-R models."""

    config: CtxXLMRobertaConfig
    reference_model_type = "xlm-roberta"


class CtxXLMRobertaModel(CtxXLMRobertaPreTrainedModel, roberta.CtxRobertaModel):
    """The encoder."""


class CtxXLMRobertaHeadModel(heads.HeadModel, CtxXLMRobertaPreTrainedModel):
    """Binds the generic heads to XLM-R's encoder."""

    encoder_class = CtxXLMRobertaModel


class CtxXLMRobertaForMaskedLM(heads.ForMaskedLM, CtxXLMRobertaHeadModel):
    """XLM-R with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = roberta.CtxRobertaForMaskedLM._tied_weights_keys
    transform_activation = roberta.CtxRobertaForMaskedLM.transform_activation


class CtxXLMRobertaForSequenceClassification(heads.ForSequenceClassification, CtxXLMRobertaHeadModel):
    """XLM-R with a classifier or regressor on the state of <s>: dense, tanh and linear."""

    classifier_activation = "tanh"

    def build_encoder(self, config: CtxXLMRobertaConfig) -> CtxPreTrainedModel:
        """Create the encoder; its `pooler_output` is the first token's state."""
        return roberta.build_first_token_encoder(self, config)


class CtxXLMRobertaForTokenClassification(heads.ForTokenClassification, CtxXLMRobertaHeadModel):
    """XLM-R with a classifier of each token."""


class CtxXLMRobertaForQuestionAnswering(heads.ForQuestionAnswering, CtxXLMRobertaHeadModel):
    """XLM-R with start and end logits of an answer span."""


class CtxXLMRobertaForMultipleChoice(heads.ForMultipleChoice, CtxXLMRobertaHeadModel):
    """XLM-R with a logit for each of several choices."""
