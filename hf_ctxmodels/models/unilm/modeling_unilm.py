"""UniLM (Dong et al. 2019, arXiv 1905.03197): BERT's network, pretrained as a bidirectional, a left-to-right, a
right-to-left and a sequence-to-sequence language model. A token's segment says which tokens it sees."""

from torch import Tensor
from transformers import GenerationMixin

from hf_ctxmodels.architectures.bert_reference import ExportsMaskedLM
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.segment_expansion import MoreSegmentsThanBert
from hf_ctxmodels.models.unilm.configuration_unilm import CtxUniLMConfig
from hf_ctxmodels.models.unilm.conversion_unilm import UNILM_EXPORT
from hf_ctxmodels.models.unilm.segment_masks import SOURCE, TARGET, segment_mask_spec


class CtxUniLMPreTrainedModel(MoreSegmentsThanBert, bert.CtxBertPreTrainedModel):
    """UniLM's part of the model base; the names of the weights are BERT's."""

    config: CtxUniLMConfig
    export_conversion = UNILM_EXPORT


class CtxUniLMModel(CtxUniLMPreTrainedModel, bert.CtxBertModel):
    """The network; `token_type_ids` say which tokens each token sees, see `segment_mask_spec`."""

    def mask_spec(self, layout: Layout, token_type_ids: Tensor | None) -> MaskSpec:
        """The masks of the segments; without segments all tokens see all."""
        return BIDIRECTIONAL if token_type_ids is None else segment_mask_spec(layout, token_type_ids)


class CtxUniLMHeadModel(CtxUniLMPreTrainedModel):
    """Binds BERT's heads to UniLM's network."""

    encoder_class = CtxUniLMModel


class CtxUniLMForMaskedLM(CtxUniLMHeadModel, bert.CtxBertForMaskedLM):
    """UniLM with the masked-LM head; the decoder is tied to the word embeddings."""


class CtxUniLMForPreTraining(CtxUniLMHeadModel, bert.CtxBertForPreTraining):
    """Masked words of rows of all four kinds, and next-sentence prediction for bidirectional pairs (section 2.3).

    `next_sentence_label` (batch,) is -100 for rows of the other kinds.
    """


class CtxUniLMForConditionalGeneration(
    QueryForConditionalGeneration, ExportsMaskedLM, CtxUniLMForMaskedLM, GenerationMixin
):
    """UniLM that writes a target for a source (section 2.4): the state of a mask token predicts the next token.

    Fine-tuning, as published, predicts masked tokens of the target, `masked_target_ids`. With `decoder_input_ids` or
    `labels` alone every token is predicted as `generate` predicts it: from a mask token after those before it.
    """

    masked_lm_class = CtxUniLMForMaskedLM
    source_type = SOURCE
    target_type = TARGET


class CtxUniLMForSequenceClassification(CtxUniLMHeadModel, bert.CtxBertForSequenceClassification):
    """UniLM with a classifier or regressor on the pooled output."""


class CtxUniLMForTokenClassification(CtxUniLMHeadModel, bert.CtxBertForTokenClassification):
    """UniLM with a classifier of each token."""


class CtxUniLMForQuestionAnswering(CtxUniLMHeadModel, bert.CtxBertForQuestionAnswering):
    """UniLM with start and end logits of an answer span."""


class CtxUniLMForMultipleChoice(CtxUniLMHeadModel, bert.CtxBertForMultipleChoice):
    """UniLM with a logit for each of several choices."""
