"""ERNIE-GEN (Xiao et al. 2020, arXiv 2001.11314): BERT's network, pretrained and fine-tuned to write by infilling
generation, in which every token of a target is predicted by a query token in its place."""

from transformers import GenerationMixin

from hf_ctxmodels.architectures.bert_reference import ExportsMaskedLM
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.segment_expansion import MoreSegmentsThanBert
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import TARGET_SEGMENT, CtxErnieGenConfig
from hf_ctxmodels.models.ernie_gen.conversion_ernie_gen import ERNIE_GEN_EXPORT


class CtxErnieGenPreTrainedModel(MoreSegmentsThanBert, bert.CtxBertPreTrainedModel):
    """ERNIE-GEN's part of the model base; the names of the weights are BERT's."""

    config: CtxErnieGenConfig
    export_conversion = ERNIE_GEN_EXPORT


class CtxErnieGenModel(CtxErnieGenPreTrainedModel, bert.CtxBertModel):
    """The network, as an encoder."""


class CtxErnieGenHeadModel(CtxErnieGenPreTrainedModel):
    """Binds BERT's heads to ERNIE-GEN's network."""

    encoder_class = CtxErnieGenModel


class CtxErnieGenForMaskedLM(CtxErnieGenHeadModel, bert.CtxBertForMaskedLM):
    """ERNIE-GEN with the masked-LM head; the decoder is tied to the word embeddings."""


class CtxErnieGenForConditionalGeneration(
    QueryForConditionalGeneration, ExportsMaskedLM, CtxErnieGenForMaskedLM, GenerationMixin
):
    """ERNIE-GEN that writes a target for a source (sections 3.1 and 3.2).

    A target begins with `[CLS]`, which is not predicted. With `span_ids` it is predicted span by span as well.
    """

    masked_lm_class = CtxErnieGenForMaskedLM
    target_type = TARGET_SEGMENT
