"""The sequence auto-encoder and LSTM language model of Dai & Le 2015 (arXiv 1511.01432), and classifiers on them.

Their idea needs no model of its own: one LSTM reads a text and then writes it again with the same weights, so the
auto-encoder is a language model of "text, end, text, end" whose loss counts in the second half. Which of the two it is,
the objective says (`sae` or `clm`). The reading and the language model are in
`hf_ctxmodels.models._shared.lstm_language_model`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.dropout import dropout, shared_dropout
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.positions import last_columns, states_at
from hf_ctxmodels.layers.recurrent.packing import PackedRows
from hf_ctxmodels.models._shared.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.models.seqae.configuration_seqae import CtxSeqaeConfig


class CtxSeqaePreTrainedModel(LSTMLanguageModelPreTrainedModel):
    """The family's part of the model base."""

    config: CtxSeqaeConfig
    base_model_prefix = "seqae"


class CtxSeqaeModel(LSTMLanguageModel, CtxSeqaePreTrainedModel):
    """Word embeddings and LSTM layers. `pooler_output` is the hidden state of a row's last word, from which the
    auto-encoder writes; of several sequences in one row, that of the last."""

    pooling = "last"

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, words) ids -> (directions, words, embedding), with word and embedding dropout."""
        vectors = dropout(self.word_embeddings(ids), self.config.embedding_dropout_prob, self.training)
        places = torch.arange(ids.shape[-1], device=ids.device)
        rate = self.config.word_dropout_prob
        return shared_dropout(vectors, places, len(places), rate, self.training, whole=True)

    def layer_dropout(self, packed: Tensor, rows: PackedRows, depth: int) -> Tensor:
        """(directions, words, width)."""
        return dropout(packed, self.config.hidden_dropout_prob if depth else 0.0, self.training)


class CtxSeqaeHeadModel(heads.HeadModel, CtxSeqaePreTrainedModel):
    """Binds the generic heads to the encoder."""

    encoder_class = CtxSeqaeModel


class CtxSeqaeForCausalLM(CtxSeqaeHeadModel, LSTMForCausalLM, GenerationMixin):
    """The language model, and the auto-encoder: given a text and its end, `generate` writes the text again."""

    def output_dropout(self, states: Tensor) -> Tensor:
        """(batch, length, hidden)."""
        return dropout(states, self.config.hidden_dropout_prob, self.training)


class CtxSeqaeForSequenceClassification(heads.ForSequenceClassification, CtxSeqaeHeadModel):
    """A linear classifier or regressor on the state behind the last word, or on the mean of all (section 3).

    With `config.label_gain="linear"` the loss in training is that of a prediction behind every word, weighted from 0 to
    1; the logits are those behind the last all the same. A text is read to its end, however long; gradients go back
    through `config.bptt` steps.
    """

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder."""
        return super().encode(**kwargs, truncation=self.config.bptt)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (batch, num_labels), and the loss where `labels` are given, see `heads.ForSequenceClassification`.

        Raises:
            CtxError: Input that does not fit together or the model; with linear gain also labels that are not (batch,)
                class ids.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        if labels is None or not self.training or self.config.label_gain == "last":
            return super().forward(**given, labels=labels, num_items_in_batch=num_items_in_batch)
        outputs = self.encode(**given)
        states = outputs.last_hidden_state
        if labels.is_floating_point() or labels.numel() != len(states):
            raise CtxError(
                f"label_gain='linear' takes labels ({len(states)},) of one class for each text; "
                f"got {tuple(labels.shape)} of {labels.dtype}.",
                hint="set label_gain='last'.",
            )
        tokens = token_mask(states, attention_mask, kwargs.get("sequence_ids"))
        logits = self.classifier(self.dropout(states))
        return SequenceClassifierOutput(
            loss=_gained_loss(logits, tokens, labels.view(-1), num_items_in_batch),
            logits=states_at(logits, last_columns(logits, tokens)),
            hidden_states=outputs.hidden_states,
        )


def label_gains(tokens: Tensor) -> Tensor:
    """(batch, length) bool, where there is a word -> the weight of a target there: of a row's first word 0, rising to
    that of the last, divided by their sum; so that texts weigh alike, however long."""
    number = tokens.long().cumsum(1) - 1
    gains = (number * tokens).float()
    gains = torch.where(tokens.sum(1, keepdim=True) == 1, tokens.float(), gains)  # a first word that is the last
    return gains / gains.sum(1, keepdim=True)


def _gained_loss(logits: Tensor, tokens: Tensor, labels: Tensor, counts: heads.ItemCounts) -> Tensor:
    """Mean over texts of their weighted cross-entropy in nats, of (batch, length, classes) logits."""
    heads.check_classes(labels, logits.shape[-1], "labels")
    every = labels[:, None].expand(tokens.shape).masked_fill(~tokens, heads.IGNORED)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), every.flatten(), ignore_index=heads.IGNORED, reduction="none"
    )
    return heads.mean_over_targets((label_gains(tokens).flatten() * losses).sum(), labels, "labels", counts)


class CtxSeqaeForTokenClassification(heads.ForTokenClassification, CtxSeqaeHeadModel):
    """A linear classifier on each word's state, which has seen the words before it."""
