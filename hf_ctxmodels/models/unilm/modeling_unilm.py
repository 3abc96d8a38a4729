"""UniLM (Dong et al. 2019, arXiv 1905.03197): BERT's network, pretrained as a bidirectional, a left-to-right, a
right-to-left and a sequence-to-sequence language model. The segments determine the attention mask."""

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.conversion_bert import exported_segment_fields
from hf_ctxmodels.models.unilm.configuration_unilm import CtxUniLMConfig
from hf_ctxmodels.models.unilm.conversion_unilm import UNILM_EXPORT
from hf_ctxmodels.models.unilm.segment_masks import SOURCE, TARGET, segment_mask_spec


class CtxUniLMPreTrainedModel(CtxPreTrainedModel):
    """Base class of the UniLM models, with BERT's weight names."""

    config: CtxUniLMConfig
    base_model_prefix = "bert"
    reference_model_type: ClassVar[str | None] = "bert"
    export_conversion = UNILM_EXPORT
    _no_split_modules = ["TransformerBlock"]
    _keys_to_ignore_on_load_unexpected = bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the BERT class, see `exported_segment_fields`."""
        architectures = {"architectures": [bert.bert_architecture(self)]}
        return super().reference_config() | architectures | exported_segment_fields(self)


class CtxUniLMModel(TransformerEncoder, CtxUniLMPreTrainedModel):
    """The UniLM encoder; `token_type_ids` determine the attention mask, see `segment_mask_spec`."""

    def mask_spec(self, layout: Layout, token_type_ids: Tensor | None) -> MaskSpec:
        """The attention mask of the segments; bidirectional without segments."""
        return BIDIRECTIONAL if token_type_ids is None else segment_mask_spec(layout, token_type_ids)


class CtxUniLMHeadModel(heads.HeadModel, CtxUniLMPreTrainedModel):
    """Base class of the UniLM models with a head."""

    encoder_class = CtxUniLMModel


class CtxUniLMForMaskedLM(heads.ForMaskedLM, CtxUniLMHeadModel):
    """UniLM with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = bert.TIED_WEIGHTS


class CtxUniLMForPreTraining(CtxUniLMPreTrainedModel, bert.CtxBertForPreTraining):
    """UniLM with masked-LM and next-sentence heads: all four objectives and next-sentence prediction (section 2.3).

    `next_sentence_label` (batch,) is -100 for examples of the other language models.
    """

    encoder_class = CtxUniLMModel


class CtxUniLMForConditionalGeneration(QueryForConditionalGeneration, CtxUniLMHeadModel, GenerationMixin):
    """UniLM that generates a target from a source (section 2.4): the state of a mask token predicts the next token.

    Fine-tuning, as published, predicts masked tokens of the target, `masked_target_ids`. With only `decoder_input_ids`
    or `labels`, every token is predicted as in `generate`: from a mask token after the tokens before it.
    """

    reference_model_type: ClassVar[str | None] = None
    source_segment = SOURCE
    target_segment = TARGET
    _tied_weights_keys = bert.TIED_WEIGHTS

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.BertForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxUniLMForMaskedLM, save_directory)


class CtxUniLMForSequenceClassification(heads.ForSequenceClassification, CtxUniLMHeadModel):
    """UniLM with a classifier or regressor on the pooled output."""


class CtxUniLMForTokenClassification(heads.ForTokenClassification, CtxUniLMHeadModel):
    """UniLM with a token classifier."""


class CtxUniLMForQuestionAnswering(heads.ForQuestionAnswering, CtxUniLMHeadModel):
    """UniLM with a span classifier for extractive question answering."""


class CtxUniLMForMultipleChoice(heads.ForMultipleChoice, CtxUniLMHeadModel):
    """UniLM with a multiple-choice classifier."""
