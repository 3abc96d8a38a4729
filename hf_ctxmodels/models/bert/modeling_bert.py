"""BERT (Devlin et al. 2019, arXiv 1810.04805): a bidirectional Transformer encoder, pretrained by masked language
modeling and next-sentence prediction."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import NextSentencePredictorOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.configurations import PAIR_SEGMENTS
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.models.bert.configuration_bert import (
    CtxBertConfig,
    bert_to_distilbert_fields,
    has_distilbert_class,
)
from hf_ctxmodels.models.bert.conversion_bert import BERT_EXPORT, DISTILBERT_EXPORT, bert_architecture

TIED_WEIGHTS = {"mlm_head.decoder.weight": "bert.embeddings.word_embeddings.weight"}


def export_masked_lm(model: Any, masked_lm_class: type[CtxPreTrainedModel], save_directory: str | Path) -> None:
    """Export the encoder and the head `mlm_head` of a model with other heads that transformers does not have, as the
    family's masked-LM model."""
    with torch.device("meta"):
        masked_lm: Any = masked_lm_class(copy.deepcopy(model.config))
    setattr(masked_lm, model.base_model_prefix, model.base_model)
    masked_lm.mlm_head = model.mlm_head
    masked_lm.export_reference(save_directory)


class CtxBertPreTrainedModel(CtxPreTrainedModel):
    """Base class of the BERT models."""

    config: CtxBertConfig
    base_model_prefix = "bert"
    reference_model_type: ClassVar[str | None] = "bert"
    # other heads of the family, SpanBERT and StructBERT, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^(mlm|nsp|sbo|sentence)_head\.", r"pooler\.", r"position_ids$"]

    @property
    def _exports_as_distilbert(self) -> bool:
        """Whether the model is exported as a DistilBERT."""
        return has_distilbert_class(self.config, self.package_class_name(), self._has_pooler)

    @property
    def _has_pooler(self) -> bool:
        return getattr(self.base_model, "pooler", None) is not None

    @property
    def export_conversion(self) -> list[WeightTransform]:  # type: ignore[override]
        """Weight conversion for export, to the layout of BERT or DistilBERT."""
        return DISTILBERT_EXPORT if self._exports_as_distilbert else BERT_EXPORT

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers."""
        if self._exports_as_distilbert:
            return bert_to_distilbert_fields(self.config, self.package_class_name())
        is_bert = self.reference_model_type == "bert"
        architecture = bert_architecture(self) if is_bert else self.reference_class_name()
        if self._has_pooler and self.config.pooler_act != "tanh":
            raise CtxError(
                f"{architecture} in transformers does not support pooler_act={self.config.pooler_act!r}.",
                hint="use save_pretrained, or load an encoder with add_pooling_layer=False.",
            )
        return super().reference_config() | {"architectures": [architecture]}

    def export_reference(self, save_directory: str | Path) -> None:
        """Write a checkpoint of the class in transformers; raises CtxError as the base class.

        A model without segment embeddings is exported as a DistilBERT, or, if DistilBERT has no such class, as a BERT
        whose segment embeddings are zero.
        """
        embeddings: Any = self.base_model.embeddings
        if self.config.type_vocab_size or self._exports_as_distilbert:
            return super().export_reference(save_directory)
        config = self.config
        zeros = embeddings.word_embeddings.weight.new_zeros(PAIR_SEGMENTS, config.hidden_size)
        try:
            self.config = copy.deepcopy(config)
            self.config.type_vocab_size = PAIR_SEGMENTS
            if not self._has_pooler:
                self.config.pooler_act = "tanh"  # has no effect
            embeddings.token_type_embeddings = nn.Embedding.from_pretrained(zeros)
            super().export_reference(save_directory)
        finally:
            self.config, embeddings.token_type_embeddings = config, None


class CtxBertModel(TransformerEncoder, CtxBertPreTrainedModel):
    """The BERT encoder without a head."""


class CtxBertHeadModel(heads.HeadModel, CtxBertPreTrainedModel):
    """Base class of the BERT models with a head."""

    encoder_class = CtxBertModel


class CtxBertForMaskedLM(heads.ForMaskedLM, CtxBertHeadModel):
    """BERT with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = TIED_WEIGHTS


@dataclass
class CtxBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxBertForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary); with `labels`, only if `needs_all_logits`.
        seq_relationship_logits: (batch, 2).
        mlm_loss, next_sentence_loss: Cross-entropy in nats per target, detached; None without targets.
        metrics: "next_sentence_accuracy", see `heads.accuracy_counts`; None without `next_sentence_label`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    next_sentence_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxBertForPreTraining(CtxBertHeadModel):
    """Model for both pretraining objectives: masked language modeling and next-sentence prediction (section 3.1).

    With `labels`, the last layer and the vocabulary's logits are computed at the labeled positions only, unless
    `needs_all_logits`.
    """

    uses_pooled_output = True
    accepts_loss_kwargs = False  # a single number of targets cannot describe two losses
    output_layer_name = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "next_sentence_label")
    logits_fields: ClassVar[Mapping[str, str]] = {"next_sentence_label": "seq_relationship_logits"}
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "next_sentence_loss")
    _tied_weights_keys = TIED_WEIGHTS

    def build_head(self, config: CtxBertConfig) -> None:
        """Create the masked-LM head and the next-sentence classifier."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        self.nsp_head = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
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
    ) -> CtxBertForPreTrainingOutput:
        """Compute the logits of both heads, and the loss. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored.
            next_sentence_label: (batch,) 0 if the second segment follows the first, 1 if it is random; -100 is ignored.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        output_mask = self.target_output_mask(return_logits, labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **self.extra_ids(task_type_ids=task_type_ids),
            **kwargs,
        )
        states = outputs.last_hidden_state
        prediction_logits = self.mlm_head(states) if output_mask is None else None
        seq_relationship_logits = self.nsp_head(outputs.pooler_output)
        mlm_loss = heads.masked_lm_loss(self.mlm_head, states, labels, num_items_in_batch, logits=prediction_logits)
        next_sentence_loss, accuracy = heads.sequence_classification_loss(
            seq_relationship_logits, next_sentence_label, "next_sentence_label", num_items_in_batch
        )
        return CtxBertForPreTrainingOutput(
            loss=self.total_loss(mlm_loss, next_sentence_loss),
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            mlm_loss=heads.detached_loss(mlm_loss, labels),
            next_sentence_loss=heads.detached_loss(next_sentence_loss, next_sentence_label),
            metrics=None if accuracy is None else {"next_sentence_accuracy": accuracy},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CtxBertForNextSentencePrediction(CtxBertHeadModel):
    """BERT with the next-sentence classifier only (section 3.1, task 2)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    uses_pooled_output = True

    def build_head(self, config: CtxBertConfig) -> None:
        """Create the next-sentence classifier."""
        self.nsp_head = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
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
        """Compute logits (batch, 2), and the loss with `labels` (batch,): 0 if the second segment follows the first, 1
        if it is random. Other arguments as in the encoder's forward."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self.extra_ids(task_type_ids=task_type_ids),
            **kwargs,
        )
        logits = self.nsp_head(outputs.pooler_output)
        loss, _ = heads.sequence_classification_loss(logits, labels, "labels", num_items_in_batch)
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class CtxBertForSequenceClassification(heads.ForSequenceClassification, CtxBertHeadModel):
    """BERT with a classifier or regressor on the pooled output."""


class CtxBertForTokenClassification(heads.ForTokenClassification, CtxBertHeadModel):
    """BERT with a token classifier."""


class CtxBertForQuestionAnswering(heads.ForQuestionAnswering, CtxBertHeadModel):
    """BERT with a span classifier for extractive question answering."""


class CtxBertForMultipleChoice(heads.ForMultipleChoice, CtxBertHeadModel):
    """BERT with a multiple-choice classifier."""
