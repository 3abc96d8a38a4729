"""SpanBERT (Joshi et al. 2020, arXiv 1907.10529): BERT's network, pretrained by predicting spans of words from their
context and from their boundaries."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import IGNORED, ItemCounts, check_token_labels, number_of_targets
from hf_ctxmodels.models._shared.bert_reference import ExportsMaskedLM, ReferenceIsBert
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.spanbert.configuration_spanbert import CtxSpanBertConfig
from hf_ctxmodels.models.spanbert.span_boundary import BoundaryTargets, SpanBoundaryHead


class CtxSpanBertPreTrainedModel(ReferenceIsBert, bert.CtxBertPreTrainedModel):
    """SpanBERT's part of the model base; the names of the encoder's weights are BERT's."""

    config: CtxSpanBertConfig
    _keys_to_ignore_on_load_unexpected = [
        *bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^sbo_head\.",
    ]


class CtxSpanBertModel(CtxSpanBertPreTrainedModel, bert.CtxBertModel):
    """The encoder; pretraining does not train its pooler."""


class CtxSpanBertHeadModel(CtxSpanBertPreTrainedModel):
    """Binds BERT's heads to SpanBERT's encoder."""

    encoder_class = CtxSpanBertModel


class CtxSpanBertForMaskedLM(CtxSpanBertHeadModel, bert.CtxBertForMaskedLM):
    """SpanBERT with the masked-LM head; the decoder is tied to the word embeddings."""


@dataclass
class CtxSpanBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxSpanBertForPreTraining`.

    Attributes:
        loss: mlm_loss + sbo_loss.
        prediction_logits: (batch, length, vocabulary) of the masked-LM head; with `labels`, only if `returns_logits`.
        mlm_loss: The masked-LM head's cross-entropy in nats, detached.
        sbo_loss: The span boundary head's, a sum over targets divided by their number plus one, detached.
        metrics: (numerator, denominator) of "sbo_share", the share of the masked tokens with a boundary target.
        hidden_states, attentions: As requested.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sbo_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxSpanBertForPreTraining(ExportsMaskedLM, CtxSpanBertForMaskedLM):
    """Both pretraining objectives: the masked-LM head on spans, and the span boundary head (section 3.2).

    Both decoders are tied to the word embeddings; each has its own bias. The encoder's last layer runs at the targets
    and at the boundaries only. transformers has no such head: `export_reference` writes the masked-LM model.
    """

    _tied_weights_keys = {
        **bert.CtxBertForMaskedLM._tied_weights_keys,
        "sbo_head.decoder.weight": "bert.embeddings.word_embeddings.weight",
    }
    masked_lm_class = CtxSpanBertForMaskedLM
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "boundary_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sbo_loss")
    accepts_loss_kwargs = False

    def build_head(self, config: CtxSpanBertConfig) -> None:
        """The masked-LM head and the span boundary head."""
        super().build_head(config)
        self.sbo_head = SpanBoundaryHead(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        boundary_labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxSpanBertForPreTrainingOutput:
        """The masked-LM head's logits, or the loss with `labels`.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; a run of them is a span.
            boundary_labels: (batch, length) those of them that the span boundary head predicts, -100 elsewhere: among
                the first `config.max_pair_targets` tokens of a span with a token before and after it. None leaves this
                term out.
            num_items_in_batch: As in `mean_over_targets`. The span boundary term's divisor is its number plus one,
                which every process adds.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder.

        Raises:
            CtxError: `boundary_labels` without `labels`, or with targets elsewhere.
        """
        labels = self.token_targets(labels, "labels", input_ids, inputs_embeds)
        boundary_labels = self.token_targets(boundary_labels, "boundary_labels", input_ids, inputs_embeds)
        pairs = self._pairs(labels, boundary_labels)
        wanted = None if labels is None or self.returns_logits(return_logits) else labels != IGNORED
        if wanted is not None and pairs is not None:
            wanted = wanted | pairs.positions
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=wanted,
            **kwargs,
        )
        states, counts = outputs.last_hidden_state, num_items_in_batch
        found: dict[str, Any] = {}
        terms: dict[str, Tensor] = {}
        targets = states if labels is None or wanted is None else states[(labels != IGNORED)[wanted]]
        mlm_loss, found["prediction_logits"] = self.masked_lm(targets, labels, counts, everywhere=wanted is None)
        if mlm_loss is not None:
            terms["mlm_loss"] = mlm_loss
        if labels is not None and boundary_labels is not None and pairs is not None:
            terms["sbo_loss"] = self._boundary_loss(states, wanted, pairs, boundary_labels, counts)
            numbers = [(each != IGNORED).sum() for each in (boundary_labels, labels)]
            found["metrics"] = {"sbo_share": torch.stack(numbers).float()}
        found |= {name: term.detach() for name, term in terms.items()}
        return CtxSpanBertForPreTrainingOutput(
            loss=self.with_unused_parameters(torch.stack([*terms.values()]).sum()) if terms else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **found,
        )

    def _pairs(self, labels: Tensor | None, boundary_labels: Tensor | None) -> BoundaryTargets | None:
        if boundary_labels is None:
            return None
        if labels is None:
            raise CtxError("boundary_labels needs labels, whose runs are the spans.", hint="give both.")
        check_token_labels(boundary_labels, self.config.vocab_size, "boundary_labels")
        return BoundaryTargets(labels, boundary_labels, self.config.max_pair_targets)

    def _boundary_loss(
        self, states: Tensor, wanted: Tensor | None, pairs: BoundaryTargets, targets: Tensor, counts: ItemCounts
    ) -> Tensor:
        """The span boundary term, from the states at all positions, or at the `wanted` ones."""
        before, after, rows = pairs.before, pairs.after, states
        if wanted is None:
            rows = states.flatten(0, 1)
        else:
            row_of = wanted.flatten().cumsum(0) - 1
            before, after = row_of[before], row_of[after]
        total = self.sbo_head.summed_loss(rows[before], rows[after], pairs.numbers, targets[targets != IGNORED])
        return total / (number_of_targets(targets, "boundary_labels", counts) + 1)


class CtxSpanBertForSequenceClassification(CtxSpanBertHeadModel, bert.CtxBertForSequenceClassification):
    """SpanBERT with a classifier or regressor on the pooled output."""


class CtxSpanBertForTokenClassification(CtxSpanBertHeadModel, bert.CtxBertForTokenClassification):
    """SpanBERT with a classifier of each token."""


class CtxSpanBertForQuestionAnswering(CtxSpanBertHeadModel, bert.CtxBertForQuestionAnswering):
    """SpanBERT with start and end logits of an answer span."""


class CtxSpanBertForMultipleChoice(CtxSpanBertHeadModel, bert.CtxBertForMultipleChoice):
    """SpanBERT with a logit for each of several choices."""
