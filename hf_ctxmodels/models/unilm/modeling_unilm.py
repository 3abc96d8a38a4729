"""UniLM (Dong et al. 2019, arXiv 1905.03197): BERT's network, pretrained as a bidirectional, a left-to-right, a
right-to-left and a sequence-to-sequence language model. The segments determine the attention mask."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, to_device
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import Layout, PaddedLayout, sequence_positions
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_EXPORT, exported_bert_fields, segment_conversion
from hf_ctxmodels.models.unilm.configuration_unilm import (
    LEFT_TO_RIGHT,
    RIGHT_TO_LEFT,
    SECOND,
    SOURCE,
    TARGET,
    CtxUniLMConfig,
)


def segment_mask_spec(layout: Layout, token_type_ids: Tensor) -> MaskSpec:
    """The attention mask of each sequence of a batch (section 2.3 and figure 1).

    All tokens attend to the tokens of `FIRST`, `SECOND` and `SOURCE`. Tokens of `LEFT_TO_RIGHT` and `TARGET` also
    attend to themselves and earlier tokens, tokens of `RIGHT_TO_LEFT` to themselves and later tokens.

    Raises:
        CtxError: Tokens of `FIRST`, `SECOND` or `SOURCE` follow other segments, or a sequence mixes `RIGHT_TO_LEFT`
            with other segments.
    """
    segments = layout.pack(host_copy(token_type_ids))
    has_custom_mask = isinstance(layout, PaddedLayout) and layout.custom_mask is not None
    if has_custom_mask or (not is_traced(segments) and not bool((segments > SECOND).any())):
        return BIDIRECTIONAL
    positions, sequence_numbers, num_sequences = sequence_positions(layout, token_type_ids.device)
    token_mask = torch.ones_like(segments, dtype=torch.bool)
    if isinstance(layout, PaddedLayout) and layout.token_mask is not None:
        token_mask = host_copy(layout.token_mask)

    def count_per_sequence(selected: Tensor) -> Tensor:
        counts = torch.zeros(num_sequences, dtype=torch.long, device=segments.device)
        return counts.index_add(0, sequence_numbers.flatten(), selected.flatten().long())[sequence_numbers]

    is_prefix = ((segments <= SECOND) | (segments == SOURCE)) & token_mask
    is_backward = (segments == RIGHT_TO_LEFT) & token_mask
    prefix_lengths, lengths, backward_lengths = map(count_per_sequence, (is_prefix, token_mask, is_backward))
    if not is_traced(segments):
        if bool((is_prefix != ((positions < prefix_lengths) & token_mask)).any()):
            raise CtxError(
                "token_type_ids: tokens of the segments 0, 1 and 4 follow tokens of other segments.",
                hint="use 0 and 1 for a pair, 2 or 3 for a text in one direction, 4 and then 5 for source and target.",
            )
        if bool(((backward_lengths != 0) & (backward_lengths != lengths)).any()):
            raise CtxError(
                "token_type_ids: a sequence mixes segment 3 (right to left) with other segments.",
                hint="use segment 3 for all tokens of the sequence.",
            )
    is_causal = (segments == LEFT_TO_RIGHT) | (segments == TARGET)
    prefix_stop = torch.where(is_causal, torch.maximum(prefix_lengths, positions + 1), prefix_lengths)
    prefix_stop = torch.where(token_mask, prefix_stop, lengths)  # padding attends to some key, which avoids NaN
    suffix_stop = torch.where(is_backward, lengths, positions + 1)
    ranges = torch.stack([prefix_stop, positions, suffix_stop], -1)
    return MaskSpec(ranges=to_device(ranges, token_type_ids.device))


class CtxUniLMPreTrainedModel(CtxPreTrainedModel):
    """Base class of the UniLM models, with BERT's weight names."""

    config: CtxUniLMConfig
    base_model_prefix = "bert"
    reference_model_type: ClassVar[str | None] = "bert"
    export_conversion = [*BERT_EXPORT, segment_conversion(CtxUniLMConfig.copied_segments)]
    _keys_to_ignore_on_load_unexpected = bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the BERT class, see `exported_bert_fields`."""
        return super().reference_config() | exported_bert_fields(self)


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
    """UniLM that generates a target from a source (section 2.5): the state of a mask token predicts the next token.

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
