"""StructBERT (Wang et al. 2019, arXiv 1908.04577): BERT's network, pretrained by masked language modeling and by the
prediction of the order of words and sentences."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.structbert.configuration_structbert import CtxStructBertConfig


class CtxStructBertPreTrainedModel(bert.CtxBertPreTrainedModel):
    """Base class of the StructBERT models, with BERT's weight names in the encoder."""

    config: CtxStructBertConfig


class CtxStructBertModel(TransformerEncoder, CtxStructBertPreTrainedModel):
    """The StructBERT encoder without a head."""


class CtxStructBertHeadModel(heads.HeadModel, CtxStructBertPreTrainedModel):
    """Base class of the StructBERT models with a head."""

    encoder_class = CtxStructBertModel


class CtxStructBertForMaskedLM(heads.ForMaskedLM, CtxStructBertHeadModel):
    """StructBERT with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = bert.TIED_WEIGHTS


@dataclass
class CtxStructBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxStructBertForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary); with targets of tokens, only if `needs_all_logits`.
        sentence_logits: (batch, 3).
        mlm_loss, sentence_loss, shuffle_loss: Cross-entropy in nats per target, detached; None without targets.
        metrics: "sentence_accuracy", see `heads.accuracy_counts`; None without `sentence_label`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sentence_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sentence_loss: Tensor | None = None
    shuffle_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxStructBertForPreTraining(CtxStructBertHeadModel):
    """Model for all pretraining objectives: masked words, word structure and sentence structure (section 2.2).

    The masked-LM head predicts the masked tokens and the tokens of shuffled n-grams. The terms have equal weights.
    transformers has no such head: `export_reference` writes the masked-LM model.
    """

    reference_model_type: ClassVar[str | None] = None
    uses_pooled_output = True
    accepts_loss_kwargs = False  # a single number of targets cannot describe three losses
    output_layer_name = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "sentence_label", "shuffle_labels")
    logits_fields: ClassVar[Mapping[str, str]] = {"sentence_label": "sentence_logits"}
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sentence_loss", "shuffle_loss")
    _tied_weights_keys = bert.TIED_WEIGHTS

    def build_head(self, config: CtxStructBertConfig) -> None:
        """Create the masked-LM head and the sentence classifier."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        self.sentence_head = nn.Linear(config.hidden_size, 3)  # classes of `sentence_label`

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.BertForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxStructBertForMaskedLM, save_directory)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_label: Tensor | None = None,
        shuffle_labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxStructBertForPreTrainingOutput:
        """Compute the logits of both heads, and the loss. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored.
            sentence_label: (batch,) 0 if the second segment follows the first, 1 if it precedes it, 2 if it is from
                another document; -100 is ignored.
            shuffle_labels: (batch, length) original ids of the tokens of shuffled n-grams; -100 is ignored.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        shuffle_labels = self.validate_token_targets(shuffle_labels, "shuffle_labels", input_ids, inputs_embeds)
        output_mask = self.target_output_mask(return_logits, labels, shuffle_labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **kwargs,
        )
        states = outputs.last_hidden_state
        prediction_logits = self.mlm_head(states) if output_mask is None else None
        sentence_logits = self.sentence_head(outputs.pooler_output)
        token_loss = partial(
            heads.masked_lm_loss, self.mlm_head, states, logits=prediction_logits, output_mask=output_mask
        )
        mlm_loss = token_loss(labels, num_items_in_batch)
        shuffle_loss = token_loss(shuffle_labels, num_items_in_batch, "shuffle_labels")
        sentence_loss, accuracy = heads.sequence_classification_loss(
            sentence_logits, sentence_label, "sentence_label", num_items_in_batch
        )
        return CtxStructBertForPreTrainingOutput(
            loss=self.total_loss(mlm_loss, sentence_loss, shuffle_loss),
            prediction_logits=prediction_logits,
            sentence_logits=sentence_logits,
            mlm_loss=heads.detached_loss(mlm_loss, labels),
            sentence_loss=heads.detached_loss(sentence_loss, sentence_label),
            shuffle_loss=heads.detached_loss(shuffle_loss, shuffle_labels),
            metrics=None if accuracy is None else {"sentence_accuracy": accuracy},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CtxStructBertForSequenceClassification(heads.ForSequenceClassification, CtxStructBertHeadModel):
    """StructBERT with a classifier or regressor on the pooled output."""


class CtxStructBertForTokenClassification(heads.ForTokenClassification, CtxStructBertHeadModel):
    """StructBERT with a token classifier."""


class CtxStructBertForQuestionAnswering(heads.ForQuestionAnswering, CtxStructBertHeadModel):
    """StructBERT with a span classifier for extractive question answering."""


class CtxStructBertForMultipleChoice(heads.ForMultipleChoice, CtxStructBertHeadModel):
    """StructBERT with a multiple-choice classifier."""
