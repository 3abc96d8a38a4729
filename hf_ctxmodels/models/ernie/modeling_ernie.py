"""ERNIE 1.0 (Sun et al. 2019, arXiv 1904.09223) and 2.0 (Sun et al. 2020, arXiv 1907.12412): BERT's network, pretrained
on masked units (words, phrases, entities), and in 2.0 on a growing set of tasks, with an embedding of the task.

Pretraining on tasks is in `pretraining_ernie`.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.ernie.configuration_ernie import CtxErnieConfig
from hf_ctxmodels.models.ernie.task_embeddings import TaskEmbeddings

TIED_WEIGHTS = {"mlm_head.decoder.weight": "ernie.embeddings.word_embeddings.weight"}


class CtxErniePreTrainedModel(bert.CtxBertPreTrainedModel):
    """Base class of the ERNIE models."""

    config: CtxErnieConfig
    base_model_prefix = "ernie"
    reference_model_type = "ernie"
    # other heads of the family, and a buffer of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^\w+_head\.", r"pooler\.", r"position_ids$"]


class CtxErnieModel(TransformerEncoder, CtxErniePreTrainedModel):
    """The ERNIE encoder without a head."""

    extra_input_ids = {"task_type_ids": "task_type_vocab_size"}

    def build_embeddings(self, config: CtxErnieConfig) -> TokenPositionTypeEmbeddings:
        """Create the embeddings, with task embeddings if `config.use_task_id`."""
        num_tasks = config.task_type_vocab_size if config.use_task_id else None
        return build_embeddings(config, width=config.hidden_size, embeddings_class=partial(TaskEmbeddings, num_tasks))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch. Other arguments as in `TransformerEncoder.forward`.

        Args:
            task_type_ids: (batch, length) indices of the tasks, if `config.use_task_id`; None for the first task.
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieHeadModel(heads.HeadModel, CtxErniePreTrainedModel):
    """Base class of the ERNIE models with a head; their forward has `task_type_ids`, see `CtxErnieModel.forward`."""

    encoder_class = CtxErnieModel


class CtxErnieForMaskedLM(heads.ForMaskedLM, CtxErnieHeadModel):
    """ERNIE with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = TIED_WEIGHTS

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the outputs of `heads.ForMaskedLM`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            return_logits=return_logits,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForMaskedLMWithPair(CtxErniePreTrainedModel, bert.CtxBertForPreTraining):
    """ERNIE 1.0's pretraining heads, masked LM and pairs: ErnieForPreTraining in transformers."""

    encoder_class = CtxErnieModel
    reference_architecture = "ErnieForPreTraining"
    _tied_weights_keys = TIED_WEIGHTS

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> bert.CtxBertForPreTrainingOutput:
        """Compute the outputs of `CtxBertForPreTraining`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            next_sentence_label=next_sentence_label,
            num_items_in_batch=num_items_in_batch,
            return_logits=return_logits,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForNextSentencePrediction(CtxErniePreTrainedModel, bert.CtxBertForNextSentencePrediction):
    """ERNIE with a next-sentence classifier."""

    encoder_class = CtxErnieModel

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> NextSentencePredictorOutput:
        """Compute the outputs of `CtxBertForNextSentencePrediction`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForSequenceClassification(heads.ForSequenceClassification, CtxErnieHeadModel):
    """ERNIE with a classifier or regressor on the pooled output."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | Seq2SeqSequenceClassifierOutput:
        """Compute the outputs of `heads.ForSequenceClassification`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForTokenClassification(heads.ForTokenClassification, CtxErnieHeadModel):
    """ERNIE with a token classifier."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Compute the outputs of `heads.ForTokenClassification`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForQuestionAnswering(heads.ForQuestionAnswering, CtxErnieHeadModel):
    """ERNIE with a span classifier for extractive question answering."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput | Seq2SeqQuestionAnsweringModelOutput:
        """Compute the outputs of `heads.ForQuestionAnswering`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            start_positions=start_positions,
            end_positions=end_positions,
            num_items_in_batch=num_items_in_batch,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieForMultipleChoice(heads.ForMultipleChoice, CtxErnieHeadModel):
    """ERNIE with a multiple-choice classifier."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        choice_mask: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Compute the outputs of `heads.ForMultipleChoice`, with task ids as in `CtxErnieModel.forward`."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            choice_mask=choice_mask,
            task_type_ids=task_type_ids,
            **kwargs,
        )
