"""The sequence auto-encoder and LSTM language model of Dai & Le 2015 (arXiv 1511.01432), and classifiers on them.

The auto-encoder's encoder and decoder share their weights. It is therefore a language model of "text, end, text, end"
with the loss on the second half. The objective selects one of them (`sae` or `clm`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_tensors
from hf_ctxmodels.layers.cpu.dropout import dropout, shared_dropout
from hf_ctxmodels.layers.pooling import build_token_mask, last_token_columns, states_at
from hf_ctxmodels.models.seqae.configuration_seqae import CtxSeqaeConfig


class CtxSeqaePreTrainedModel(LSTMLanguageModelPreTrainedModel):
    """Base class of the sequence auto-encoder models."""

    config: CtxSeqaeConfig
    base_model_prefix = "seqae"


class CtxSeqaeModel(LSTMLanguageModel, CtxSeqaePreTrainedModel):
    """Word embeddings and LSTM layers. `pooler_output` is the hidden state of the last word."""

    pooling = "last"

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, words) ids -> (directions, words, embedding), with word and embedding dropout."""
        vectors = dropout(self.word_embeddings(ids), self.config.embedding_dropout_prob, self.training)
        positions = torch.arange(ids.shape[-1], device=ids.device)
        rate = self.config.word_dropout_prob
        return shared_dropout(vectors, positions, positions.shape[0], rate, self.training, drop_rows=True)


class CtxSeqaeHeadModel(heads.HeadModel, CtxSeqaePreTrainedModel):
    """Base class of the sequence auto-encoder models with a head."""

    encoder_class = CtxSeqaeModel


class CtxSeqaeForCausalLM(LSTMForCausalLM, CtxSeqaePreTrainedModel, GenerationMixin):
    """The language model, and the auto-encoder: `generate` reconstructs a text that ends with the end token."""

    encoder_class = CtxSeqaeModel


class CtxSeqaeForSequenceClassification(heads.ForSequenceClassification, CtxSeqaeHeadModel):
    """A linear classifier or regressor on the last word's state, or on the mean of all states (section 3).

    With `config.label_gain="linear"` the training loss is a weighted mean over predictions at all words; the logits are
    the prediction at the last word. Texts are encoded completely; gradients are back-propagated through `config.bptt`
    steps.
    """

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder with truncated back-propagation."""
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
        """Compute (batch, num_labels) logits, and the loss with `labels`; see `heads.ForSequenceClassification`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        if labels is None or not self.training or self.config.label_gain == "last":
            return super().forward(**inputs, labels=labels, num_items_in_batch=num_items_in_batch)
        check_tensors(labels=labels)
        outputs = self.encode(**inputs)
        states = outputs.last_hidden_state
        problem_type = heads.infer_problem_type(self.config, labels)
        if problem_type != "single_label_classification" or labels.is_floating_point() or labels.numel() != len(states):
            expected = f"label_gain='linear' requires ({len(states)},) labels, one class per text"
            raise CtxError(
                f"{expected}; got {tuple(labels.shape)} {labels.dtype}, num_labels={self.config.num_labels} and "
                f"problem_type={self.config.problem_type!r}.",
                hint="set label_gain='last'.",
            )
        token_mask = build_token_mask(states, attention_mask, kwargs.get("sequence_ids"))
        logits = self.classifier(self.dropout(states))
        labels = heads.validate_sequence_targets(labels, "labels", len(states))
        heads.check_classes(labels, logits.shape[-1], "labels")
        targets = labels[:, None].expand(token_mask.shape).masked_fill(~token_mask, heads.IGNORE_INDEX)
        losses = F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
        total = (label_gains(token_mask) * losses).sum()
        loss = heads.mean_over_targets(total, labels, "labels", num_items_in_batch)
        return SequenceClassifierOutput(
            loss=self.add_regularization(loss, outputs, labels, "labels", num_items_in_batch),
            logits=states_at(logits, last_token_columns(logits, token_mask)),
            hidden_states=outputs.hidden_states,
        )


def label_gains(token_mask: Tensor) -> Tensor:
    """(batch, length) weights that increase linearly from 0 and sum to 1 over the tokens of a bool mask."""
    gains = ((token_mask.long().cumsum(1) - 1) * token_mask).float()
    gains = torch.where(token_mask.sum(1, keepdim=True) == 1, token_mask.float(), gains)  # a single word
    return gains / gains.sum(1, keepdim=True)


class CtxSeqaeForTokenClassification(heads.ForTokenClassification, CtxSeqaeHeadModel):
    """A linear classifier of each word's state."""


class CtxSeqaeForQuestionAnswering(heads.ForQuestionAnswering, CtxSeqaeHeadModel):
    """Start and end logits of each word's state; the model reads the question before the context."""
