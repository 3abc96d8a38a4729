"""StructBERT (Wang et al. 2019, arXiv 1908.04577): BERT's network, pretrained on masked words, the order of shuffled
words and the order of two segments."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.heads import IGNORED, ItemCounts
from hf_ctxmodels.models._shared.bert_reference import ExportsMaskedLM, ReferenceIsBert
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.structbert.configuration_structbert import CtxStructBertConfig

SENTENCE_CLASSES = 3
"""The second segment follows the first, precedes it, or is of another document."""


class CtxStructBertPreTrainedModel(ReferenceIsBert, bert.CtxBertPreTrainedModel):
    """StructBERT's part of the model base; the names of the encoder's weights are BERT's."""

    config: CtxStructBertConfig
    _keys_to_ignore_on_load_unexpected = [
        *bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^sentence_head\.",
    ]


class CtxStructBertModel(CtxStructBertPreTrainedModel, bert.CtxBertModel):
    """The encoder."""


class CtxStructBertHeadModel(CtxStructBertPreTrainedModel):
    """Binds BERT's heads to StructBERT's encoder."""

    encoder_class = CtxStructBertModel


class CtxStructBertForMaskedLM(CtxStructBertHeadModel, bert.CtxBertForMaskedLM):
    """StructBERT with the masked-LM head; the decoder is tied to the word embeddings."""


@dataclass
class CtxStructBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxStructBertForPreTraining`.

    Attributes:
        loss: The sum of the terms with targets.
        prediction_logits: (batch, length, vocabulary); with `labels`, only if `returns_logits`.
        sentence_logits: (batch, 3) of the pairs.
        mlm_loss, sentence_loss, shuffle_loss: Cross-entropies in nats, detached: of masked tokens, pairs and tokens of
            shuffled n-grams.
        metrics: (numerator, denominator) of "sentence_accuracy".
        hidden_states, attentions: As requested.
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


class CtxStructBertForPreTraining(ExportsMaskedLM, CtxStructBertForMaskedLM):
    """All pretraining objectives: masked words, word structure and sentence structure (section 2.2).

    The masked-LM head predicts masked tokens and those of shuffled n-grams. The terms have equal weights, each a mean
    over its own targets. transformers has no such head: `export_reference` writes the masked-LM model.
    """

    masked_lm_class = CtxStructBertForMaskedLM
    pools = True
    accepts_loss_kwargs = False
    pair_label: ClassVar[str] = "sentence_label"
    pair_logits: ClassVar[str] = "sentence_logits"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "sentence_label", "shuffle_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sentence_loss", "shuffle_loss")

    def build_head(self, config: CtxStructBertConfig) -> None:
        """The masked-LM head and the classifier of pairs."""
        super().build_head(config)
        self.sentence_head = nn.Linear(config.hidden_size, SENTENCE_CLASSES)

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
        """Logits of both heads, and the loss.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; the last layer and the vocabulary logits
                are then computed only there and at `shuffle_labels`.
            sentence_label: (batch,) 0 if the second segment follows the first, 1 if it precedes it, 2 if it is of
                another document; -100 is ignored.
            shuffle_labels: (batch, length) original ids of the tokens of shuffled n-grams, -100 elsewhere.
            num_items_in_batch: As in `mean_over_targets`.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder.
        """
        of_tokens = {"labels": labels, "shuffle_labels": shuffle_labels}
        given = {name: self.token_targets(each, name, input_ids, inputs_embeds) for name, each in of_tokens.items()}
        targets = {name: each for name, each in given.items() if each is not None}
        wanted = None
        if targets and not self.returns_logits(return_logits):
            wanted = torch.stack([each != IGNORED for each in targets.values()]).any(0)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=wanted,
            **kwargs,
        )
        states, counts = outputs.last_hidden_state, num_items_in_batch
        found: dict[str, Any] = {"sentence_logits": self.sentence_head(outputs.pooler_output)}
        if wanted is None:
            found["prediction_logits"] = self.mlm_head(states)
        terms = {
            _TERMS[name]: self._token_loss(name, each, states, wanted, found.get("prediction_logits"), counts)
            for name, each in targets.items()
        }
        if sentence_label is not None:
            logits = found["sentence_logits"]
            classes = heads.row_targets(sentence_label, "sentence_label", len(logits))
            terms["sentence_loss"] = heads.cross_entropy_over_targets(logits, classes, "sentence_label", counts)
            found["metrics"] = {"sentence_accuracy": heads.accuracy_counts(logits, classes)}
        found |= {name: term.detach() for name, term in terms.items()}
        return CtxStructBertForPreTrainingOutput(
            loss=torch.stack([*terms.values()]).sum() if terms else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **found,
        )

    def _token_loss(
        self,
        name: str,
        targets: Tensor,
        states: Tensor,
        wanted: Tensor | None,
        logits: Tensor | None,
        counts: ItemCounts,
    ) -> Tensor:
        """The masked-LM head's term, from the logits of all positions, or the states at the `wanted` ones."""
        if wanted is None:
            assert logits is not None
            return heads.loss_of_logits(logits, targets, counts, name)
        here, head = states[(targets != IGNORED)[wanted]], self.mlm_head
        return heads.language_modeling_loss(head.decoder, here, targets, counts, name, summed_loss=head.summed_loss)


_TERMS = {"labels": "mlm_loss", "shuffle_labels": "shuffle_loss"}


class CtxStructBertForSequenceClassification(CtxStructBertHeadModel, bert.CtxBertForSequenceClassification):
    """StructBERT with a classifier or regressor on the pooled output."""


class CtxStructBertForTokenClassification(CtxStructBertHeadModel, bert.CtxBertForTokenClassification):
    """StructBERT with a classifier of each token."""


class CtxStructBertForQuestionAnswering(CtxStructBertHeadModel, bert.CtxBertForQuestionAnswering):
    """StructBERT with start and end logits of an answer span."""


class CtxStructBertForMultipleChoice(CtxStructBertHeadModel, bert.CtxBertForMultipleChoice):
    """StructBERT with a logit for each of several choices."""
