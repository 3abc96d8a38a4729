"""ULMFiT (Howard & Ruder 2018, arXiv 1801.06146): a language model of LSTMs, and what is fine-tuned from it.

Defined here: the dropouts of the AWD-LSTM (Merity et al. 2017, arXiv 1708.02182), the two regularization terms of its
language model, and the classifier. Encoder and language model are in `hf_ctxmodels.models._shared.lstm_language_model`,
the LSTM in `layers.recurrent`, dropout in `layers.dropout`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.layers.dropout import Dropout, shared_dropout
from hf_ctxmodels.layers.norm import RowNorm
from hf_ctxmodels.layers.pooling import RowPooler, token_mask
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import PackedRows
from hf_ctxmodels.models._shared.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig

_HIDDEN_DROPOUT = 0.1  # of the classifier's hidden layer, as in the released code


class CtxUlmfitPreTrainedModel(LSTMLanguageModelPreTrainedModel):
    """ULMFiT's part of the model base."""

    config: CtxUlmfitConfig
    base_model_prefix = "ulmfit"


class CtxUlmfitModel(LSTMLanguageModel, CtxUlmfitPreTrainedModel):
    """Word embeddings and LSTM layers with weight dropout, which read from left to right, or from right to left with
    `config.backward`."""

    @property
    def is_backward(self) -> bool:
        """Whether a text is read from right to left."""
        return self.config.backward

    def build_layer(self, input_size: int, output_size: int) -> LSTM:
        """A layer with dropout of its recurrent weights."""
        rate = self.config.rate("weight")
        return LSTM(input_size, output_size, directions=1, state_bias=True, weight_dropout=rate)

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, words) ids -> (directions, words, hidden), with embedding dropout."""
        rate = self.config.rate("embedding")
        vectors = self.word_embeddings(ids)
        return shared_dropout(vectors, ids, self.config.vocab_size, rate, self.training, whole=True)

    def layer_dropout(self, packed: Tensor, rows: PackedRows, depth: int) -> Tensor:
        """Variational dropout: a row loses the same features at every step."""
        rate = self.config.rate("hidden" if depth else "input")
        return shared_dropout(packed, rows.numbers, len(rows.order), rate, self.training, whole=False)


class CtxUlmfitHeadModel(heads.HeadModel, CtxUlmfitPreTrainedModel):
    """Binds the generic heads to the encoder."""

    encoder_class = CtxUlmfitModel

    def output_dropout(self, states: Tensor) -> Tensor:
        """Variational dropout of (batch, length, hidden): a row loses the same features at every step."""
        rows = torch.arange(len(states), device=states.device)[:, None].expand(states.shape[:2])
        return shared_dropout(states, rows, len(states), self.config.rate("output"), self.training, whole=False)


class CtxUlmfitForCausalLM(CtxUlmfitHeadModel, LSTMForCausalLM, GenerationMixin):
    """The language model (section 3.1); its softmax is tied to the word embeddings unless `config.tie_word_embeddings`
    is False."""

    _tied_weights_keys = {"decoder.weight": "ulmfit.word_embeddings.weight"}

    def regularization_loss(self, raw: Tensor, dropped: Tensor, target_mask: Tensor, neighbours: Tensor) -> Tensor:
        """AR and TAR (Merity et al. 2017, section 4.6), each summed over the words that have a target."""
        size = dropped[target_mask].float().square().mean(-1).sum()
        change = (raw[:, 1:] - raw[:, :-1])[target_mask[:, 1:] & neighbours].float().square().mean(-1).sum()
        return self.config.activation_penalty * size + self.config.slowness_penalty * change


class CtxUlmfitForSequenceClassification(heads.ForSequenceClassification, CtxUlmfitHeadModel):
    """ULMFiT with a classifier or regressor on the last state, the largest values and the mean (section 3.3).

    A text of any length is read to its end; gradients are propagated through `config.bptt` steps.
    """

    def build_encoder(self, config: CtxUlmfitConfig) -> CtxUlmfitModel:
        """The encoder and the pooling."""
        self.pooler = RowPooler("first+max+mean" if config.backward else "last+max+mean")
        return CtxUlmfitModel(config)

    def build_head(self, config: CtxUlmfitConfig) -> None:
        """Two blocks, each of a normalisation, dropout and a linear map."""
        norm = RowNorm if config.classifier_norm == "batch" else nn.LayerNorm
        self.dropout = nn.Identity()  # dropout follows the normalisation
        self.classifier = nn.Sequential(
            norm(config.pooled_size),
            Dropout(config.head_dropout),
            nn.Linear(config.pooled_size, config.classifier_size),
            nn.ReLU(),
            norm(config.classifier_size),
            Dropout(_HIDDEN_DROPOUT if config.head_dropout else 0.0),
            nn.Linear(config.classifier_size, config.num_labels),
        )

    def encode(self, attention_mask: Tensor | None = None, sequence_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder, and pool."""
        kwargs |= {"attention_mask": attention_mask, "sequence_ids": sequence_ids, "truncation": self.config.bptt}
        outputs = super().encode(**kwargs)
        states = self.output_dropout(outputs.last_hidden_state)
        outputs.pooler_output = self.pooler(states, token_mask(states, attention_mask, sequence_ids))
        return outputs


class CtxUlmfitForTokenClassification(heads.ForTokenClassification, CtxUlmfitHeadModel):
    """ULMFiT with a linear classifier on each word's state, which has seen the words before it."""
