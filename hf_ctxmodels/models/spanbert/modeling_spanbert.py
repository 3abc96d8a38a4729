"""SpanBERT (Joshi et al. 2020, arXiv 1907.10529): BERT's network, pretrained by predicting spans of words from their
context and from their boundaries."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.bert_reference import ExportsMaskedLM, ReferenceIsBert
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts, check_token_labels, number_of_targets
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


class CtxSpanBertForPreTraining(ExportsMaskedLM, heads.ForMaskedLMWithTasks, CtxSpanBertForMaskedLM):
    """Both pretraining objectives: the masked-LM head on spans, and the span boundary head (section 3.2).

    A run of `labels` is a span; `boundary_labels` (batch, length) are those of them that the span boundary head
    predicts, -100 elsewhere: among the first `config.max_pair_targets` tokens of a span with a token before and after
    it. That term is a sum over targets divided by their number plus one, which every process adds; the output's
    `metrics` have "sbo_share", the share of the masked tokens with a boundary target.

    Both decoders are tied to the word embeddings; each has its own bias. The encoder's last layer runs at the targets
    and at the boundaries only. transformers has no such head: `export_reference` writes the masked-LM model.
    """

    _tied_weights_keys = {
        **bert.CtxBertForMaskedLM._tied_weights_keys,
        "sbo_head.decoder.weight": "bert.embeddings.word_embeddings.weight",
    }
    masked_lm_class = CtxSpanBertForMaskedLM
    tasks = (heads.PretrainingTask("sbo", "boundary_labels", "sbo_head", of_tokens=True),)

    def build_head(self, config: CtxSpanBertConfig) -> None:
        """The masked-LM head and the span boundary head."""
        super().build_head(config)
        self.sbo_head = SpanBoundaryHead(config)

    def output_mask(self, targets: Mapping[str, Tensor]) -> Tensor | None:
        """The masked tokens and the boundaries."""
        spans = self._boundaries(targets)
        return super().output_mask(targets) if spans is None else spans.positions | (targets["labels"] != IGNORE_INDEX)

    def predict(
        self,
        task: heads.PretrainingTask,
        outputs: Any,
        targets: Mapping[str, Tensor],
        output_mask: Tensor | None,
        counts: ItemCounts,
    ) -> heads.Prediction:
        """As there; the span boundary term, from the states at all positions, or at those of `output_mask`."""
        if task.name != "sbo":
            return super().predict(task, outputs, targets, output_mask, counts)
        if (spans := self._boundaries(targets)) is None:
            return heads.Prediction()
        before, after = spans.rows(output_mask)
        rows = outputs.last_hidden_state.flatten(0, -2)
        labels, own = targets["labels"], targets["boundary_labels"]
        boundaries = (rows[before], rows[after], spans.numbers)
        total = self.sbo_head.summed_loss(*boundaries, own[own != IGNORE_INDEX])
        share = torch.stack([(each != IGNORE_INDEX).sum() for each in (own, labels)]).float()
        loss = total / (number_of_targets(own, "boundary_labels", counts) + 1)
        return heads.Prediction(loss, metrics={"sbo_share": share})

    def _boundaries(self, targets: Mapping[str, Tensor]) -> BoundaryTargets | None:
        if "boundary_labels" not in targets:
            return None
        if "labels" not in targets:
            raise CtxError("boundary_labels needs labels, whose runs are the spans.", hint="give both.")
        check_token_labels(targets["boundary_labels"], self.config.vocab_size, "boundary_labels")
        return BoundaryTargets(targets["labels"], targets["boundary_labels"], self.config.max_pair_targets)


CtxSpanBertForPreTrainingOutput = CtxSpanBertForPreTraining.output_class


class CtxSpanBertForSequenceClassification(CtxSpanBertHeadModel, bert.CtxBertForSequenceClassification):
    """SpanBERT with a classifier or regressor on the pooled output."""


class CtxSpanBertForTokenClassification(CtxSpanBertHeadModel, bert.CtxBertForTokenClassification):
    """SpanBERT with a classifier of each token."""


class CtxSpanBertForQuestionAnswering(CtxSpanBertHeadModel, bert.CtxBertForQuestionAnswering):
    """SpanBERT with start and end logits of an answer span."""


class CtxSpanBertForMultipleChoice(CtxSpanBertHeadModel, bert.CtxBertForMultipleChoice):
    """SpanBERT with a logit for each of several choices."""
