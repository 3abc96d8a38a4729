"""SpanBERT (Joshi et al. 2020, arXiv 1907.10529): BERT's network, pretrained by predicting masked spans from their
context and from their boundaries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.spanbert.configuration_spanbert import CtxSpanBertConfig
from hf_ctxmodels.models.spanbert.span_boundary import BoundaryTargets, SpanBoundaryHead


class CtxSpanBertPreTrainedModel(bert.CtxBertPreTrainedModel):
    """Base class of the SpanBERT models, with BERT's weight names in the encoder."""

    config: CtxSpanBertConfig
    _keys_to_ignore_on_load_unexpected = [
        *bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^sbo_head\.",
    ]


class CtxSpanBertModel(TransformerEncoder, CtxSpanBertPreTrainedModel):
    """The SpanBERT encoder; pretraining does not train its pooler."""


class CtxSpanBertHeadModel(heads.HeadModel, CtxSpanBertPreTrainedModel):
    """Base class of the SpanBERT models with a head."""

    encoder_class = CtxSpanBertModel


class CtxSpanBertForMaskedLM(heads.ForMaskedLM, CtxSpanBertHeadModel):
    """SpanBERT with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = bert.TIED_WEIGHTS


@dataclass
class CtxSpanBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxSpanBertForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary); with targets, only if `returns_logits`.
        mlm_loss: Cross-entropy in nats per target, detached; None without targets.
        sbo_loss: Loss of the span boundary objective, detached; None without targets.
        metrics: "sbo_share", the share of masked tokens with a boundary target, see `heads.accuracy_counts`; None
            without `boundary_labels`.
        hidden_states, attentions: Hidden states and attention weights of the encoder; None unless requested.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sbo_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxSpanBertForPreTraining(CtxSpanBertHeadModel):
    """Model for both pretraining objectives: the masked-LM head on spans, and the span boundary head (section 3.2).

    The loss of the span boundary objective is a sum over targets divided by their number plus one, which every process
    adds. Both decoders are tied to the word embeddings; each has its own bias. The encoder's last layer is computed at
    the targets and at the boundaries only. transformers has no such head: `export_reference` writes the masked-LM
    model.
    """

    reference_model_type: ClassVar[str | None] = None
    accepts_loss_kwargs = False  # a single number of targets cannot describe two losses
    output_layer = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "boundary_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sbo_loss")
    _tied_weights_keys = {
        **bert.TIED_WEIGHTS,
        "sbo_head.decoder.weight": "bert.embeddings.word_embeddings.weight",
    }

    def build_head(self, config: CtxSpanBertConfig) -> None:
        """Create the masked-LM head and the span boundary head."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        self.sbo_head = SpanBoundaryHead(config)

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.BertForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxSpanBertForMaskedLM, save_directory)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        boundary_labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxSpanBertForPreTrainingOutput:
        """Compute the logits of the masked-LM head, and the loss. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored. A run of labels is a span.
            boundary_labels: (batch, length) the labels that the span boundary head predicts, -100 elsewhere: they are
                among the first `config.max_pair_targets` tokens of a span with a token before and after it.
            num_items_in_batch: Numbers of targets by argument, see `heads.mean_over_targets`.
            return_logits: See `returns_logits`.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        boundary_labels = self.validate_token_targets(boundary_labels, "boundary_labels", input_ids, inputs_embeds)
        boundaries = self._boundaries(labels, boundary_labels)
        output_mask = None
        if labels is not None and not self.returns_logits(return_logits):
            output_mask = labels != IGNORE_INDEX
            if boundaries is not None:
                output_mask = output_mask | boundaries.positions
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
        mlm_loss = sbo_loss = metrics = None
        if labels is not None and prediction_logits is not None:
            mlm_loss = heads.loss_from_logits(prediction_logits, labels, num_items_in_batch)
        elif labels is not None:
            mlm_states = heads.select_states(states, labels, output_mask)
            mlm_loss = heads.masked_lm_loss(self.mlm_head, mlm_states, labels, num_items_in_batch)
        if labels is not None and boundary_labels is not None and boundaries is not None:
            sbo_loss = self._boundary_loss(states, boundaries, boundary_labels, output_mask, num_items_in_batch)
            is_target = torch.stack([boundary_labels != IGNORE_INDEX, labels != IGNORE_INDEX])
            metrics = {"sbo_share": is_target.sum((1, 2)).float()}
        return CtxSpanBertForPreTrainingOutput(
            loss=self.total_loss(mlm_loss, sbo_loss),
            prediction_logits=prediction_logits,
            mlm_loss=heads.detached_loss(mlm_loss, labels),
            sbo_loss=heads.detached_loss(sbo_loss, boundary_labels),
            metrics=metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _boundaries(self, labels: Tensor | None, boundary_labels: Tensor | None) -> BoundaryTargets | None:
        if boundary_labels is None:
            return None
        if labels is None:
            raise CtxError("boundary_labels needs labels, whose runs are the spans.", hint="pass both.")
        heads.check_token_labels(boundary_labels, self.config.vocab_size, "boundary_labels")
        return BoundaryTargets(labels, boundary_labels, self.config.max_pair_targets)

    def _boundary_loss(
        self,
        states: Tensor,
        boundaries: BoundaryTargets,
        boundary_labels: Tensor,
        output_mask: Tensor | None,
        num_items: ItemCounts,
    ) -> Tensor:
        """The loss of the span boundary objective; the states are at the positions of `output_mask`, or at all."""
        before, after = boundaries.output_indices(output_mask)
        flat_states = states.flatten(0, -2)
        targets = boundary_labels[boundary_labels != IGNORE_INDEX]
        total = self.sbo_head.summed_loss(flat_states[before], flat_states[after], boundaries.offsets, targets)
        return total / (heads.number_of_targets(boundary_labels, "boundary_labels", num_items) + 1)


class CtxSpanBertForSequenceClassification(heads.ForSequenceClassification, CtxSpanBertHeadModel):
    """SpanBERT with a classifier or regressor on the pooled output."""


class CtxSpanBertForTokenClassification(heads.ForTokenClassification, CtxSpanBertHeadModel):
    """SpanBERT with a token classifier."""


class CtxSpanBertForQuestionAnswering(heads.ForQuestionAnswering, CtxSpanBertHeadModel):
    """SpanBERT with a span classifier for extractive question answering."""


class CtxSpanBertForMultipleChoice(heads.ForMultipleChoice, CtxSpanBertHeadModel):
    """SpanBERT with a multiple-choice classifier."""
