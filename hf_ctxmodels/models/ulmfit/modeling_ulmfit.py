"""ULMFiT (Howard & Ruder 2018, arXiv 1801.06146): an AWD-LSTM language model (Merity et al. 2017, arXiv 1708.02182),
fine-tuned for downstream tasks.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.core.host_copies import on_host, select_true
from hf_ctxmodels.layers.common import SafeBatchNorm1d
from hf_ctxmodels.layers.cpu.dropout import Dropout, shared_dropout, variational_dropout
from hf_ctxmodels.layers.pooling import PoolingLayer, build_token_mask
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig


class CtxUlmfitPreTrainedModel(LSTMLanguageModelPreTrainedModel):
    """Base class of the ULMFiT models."""

    config: CtxUlmfitConfig
    base_model_prefix = "ulmfit"


class CtxUlmfitModel(LSTMLanguageModel, CtxUlmfitPreTrainedModel):
    """Word embeddings and LSTM layers with weight dropout; with `config.backward` they read from right to left."""

    @property
    def is_backward(self) -> bool:
        """Whether the model reads from right to left."""
        return self.config.backward

    def build_layer(self, input_size: int, output_size: int) -> LSTM:
        """Create a layer with dropout of its recurrent weights."""
        rate = self.config.dropout_rate("weight")
        return LSTM(input_size, output_size, directions=1, state_bias=True, weight_dropout=rate)

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, words) ids -> (directions, words, hidden), with embedding dropout."""
        rate = self.config.dropout_rate("embedding")
        vectors = self.word_embeddings(ids)
        return shared_dropout(vectors, ids, self.config.vocab_size, rate, self.training, drop_rows=True)

    def layer_dropout(self, packed: Tensor, packing: PackedSequences, depth: int) -> Tensor:
        """Variational dropout: the same features of a sequence are dropped at every step."""
        rate = self.config.dropout_rate("hidden" if depth else "input")
        num_sequences = packing.order.shape[0]
        return shared_dropout(packed, packing.sequence_indices, num_sequences, rate, self.training, drop_rows=False)


class CtxUlmfitHeadModel(heads.HeadModel, CtxUlmfitPreTrainedModel):
    """Base class of the ULMFiT models with a head."""

    encoder_class = CtxUlmfitModel


class CtxUlmfitForCausalLM(LSTMForCausalLM, CtxUlmfitPreTrainedModel, GenerationMixin):
    """The language model (section 3.1)."""

    encoder_class = CtxUlmfitModel
    _tied_weights_keys = {"decoder.weight": "ulmfit.word_embeddings.weight"}

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether Trainer can smooth the loss, which has neither AR nor TAR."""
        has_penalty = self.config.activation_penalty or self.config.slowness_penalty
        return super().supports_label_smoothing and not has_penalty

    def output_dropout(self, states: Tensor) -> Tensor:
        """Variational dropout of (batch, length, hidden)."""
        return variational_dropout(states, self.config.dropout_rate("output"), self.training)

    def regularization_loss(
        self, states: Tensor, dropped_states: Tensor, target_mask: Tensor, is_same_sequence: Tensor
    ) -> Tensor:
        """AR and TAR (Merity et al. 2017, section 4.6), each summed over the words with a target."""
        size = select_true(dropped_states, target_mask).float().square().mean(-1).sum()
        both = on_host(lambda mask, same: mask[:, 1:] & same, target_mask, is_same_sequence)
        changes = select_true(states[:, 1:] - states[:, :-1], both)
        change = changes.float().square().mean(-1).sum()
        return self.config.activation_penalty * size + self.config.slowness_penalty * change


class CtxUlmfitForSequenceClassification(heads.ForSequenceClassification, CtxUlmfitHeadModel):
    """ULMFiT with a classifier or regressor on the last state, the maximum and the mean (section 3.3).

    Texts are encoded completely; gradients are back-propagated through `config.bptt` steps.
    """

    def build_encoder(self, config: CtxUlmfitConfig) -> CtxUlmfitModel:
        """Create the encoder and the pooling."""
        self.pooler = PoolingLayer("first+max+mean" if config.backward else "last+max+mean")
        return CtxUlmfitModel(config)

    def build_head(self, config: CtxUlmfitConfig) -> None:
        """Create two blocks of normalization, dropout and a linear layer."""
        norm = SafeBatchNorm1d if config.classifier_norm == "batch" else nn.LayerNorm
        self.dropout = nn.Identity()  # dropout follows the normalization
        self.classifier = nn.Sequential(
            norm(config.pooler_size),
            Dropout(config.head_dropout),
            nn.Linear(config.pooler_size, config.classifier_size),
            nn.ReLU(),
            norm(config.classifier_size),
            Dropout(0.1 if config.head_dropout else 0.0),  # the rate of the released code
            nn.Linear(config.classifier_size, config.num_labels),
        )

    def encode(self, attention_mask: Tensor | None = None, sequence_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder and the pooling."""
        kwargs |= {"attention_mask": attention_mask, "sequence_ids": sequence_ids, "truncation": self.config.bptt}
        outputs = super().encode(**kwargs)
        states = variational_dropout(outputs.last_hidden_state, self.config.dropout_rate("output"), self.training)
        outputs.pooler_output = self.pooler(states, build_token_mask(states, attention_mask, sequence_ids))
        return outputs


class CtxUlmfitForTokenClassification(heads.ForTokenClassification, CtxUlmfitHeadModel):
    """ULMFiT with a linear classifier of each word's state."""


class CtxUlmfitForQuestionAnswering(heads.ForQuestionAnswering, CtxUlmfitHeadModel):
    """ULMFiT with start and end logits of each word's state; the model reads the question before the context."""
