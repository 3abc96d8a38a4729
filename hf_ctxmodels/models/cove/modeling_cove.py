"""CoVe (McCann et al. 2017, arXiv 1708.00107): each token's frozen GloVe vector concatenated with the hidden state of a
bidirectional LSTM pretrained on translation. The translation model is in `translation_cove`."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    PretrainedEmbeddingEncoder,
    PretrainedEmbeddingPreTrainedModel,
)
from hf_ctxmodels.architectures.recurrent_inputs import prepare_inputs, zero_padding
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import forward_fill_padding, token_mask
from hf_ctxmodels.layers.recurrent.attentional_decoder import reset_lstm_cell
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import run_bidirectional
from hf_ctxmodels.models.cove.biattention import Biattention, MaxoutClassifier
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig


class CtxCovePreTrainedModel(PretrainedEmbeddingPreTrainedModel):
    """CoVe's part of the model base."""

    config: CtxCoveConfig
    base_model_prefix = "cove"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LSTMCell):
            reset_lstm_cell(module)
        else:
            super()._init_weights(module)


@dataclass
class CtxCoveModelOutput(BaseModelOutputWithPooling):
    """Output of `CtxCoveModel`.

    Attributes:
        last_hidden_state: (batch, length, embedding + hidden): the word vector concatenated with the top layer's state.
        hidden_states: The word vectors, the outputs of the lower layers, and `last_hidden_state`.
        final_hidden, final_cell: (batch, layers, hidden) final hidden and cell states, both directions concatenated.
    """

    final_hidden: Tensor | None = None
    final_cell: Tensor | None = None


class CtxCoveModel(PretrainedEmbeddingEncoder, CtxCovePreTrainedModel):
    """Pretrained word vectors and the MT-LSTM; its output is [GloVe(w); MT-LSTM(GloVe(w))] (section 4).

    Attributes:
        returns_final_states: Whether `forward` returns the final states for a decoder by default.
    """

    returns_final_states = False

    def __init__(self, config: CtxCoveConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.build_embeddings(config)
        widths = [config.embedding_size, *[config.hidden_size] * (config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList(LSTM(width, config.hidden_size // 2, state_bias=True) for width in widths)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_final_states: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CtxCoveModelOutput:
        """Encode a batch.

        Args: those of `prepare_inputs`, whose errors it raises, and
            token_type_ids: (batch, length), checked only: heads use them to separate two texts.
            output_final_states: Return `final_hidden` and `final_cell`; None for `returns_final_states`.
            output_hidden_states: Return `hidden_states`.
            kwargs: Ignored arguments of other families' models.
        """
        given = (input_ids, inputs_embeds, attention_mask, sequence_ids)
        aligned = {"output_mask": output_mask, "token_type_ids": token_type_ids}
        inputs = prepare_inputs(self, *given, width=self.config.embedding_size, **aligned)
        embeddings = inputs.embed(self.word_embeddings)
        states, final = run_bidirectional(self.layers, embeddings, inputs.pack(2), self.dropout)
        vectors = zero_padding(embeddings, inputs.tokens).to(states[-1].dtype)
        last = torch.cat([vectors, states[-1]], -1)
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        returns_final = self.returns_final_states if output_final_states is None else output_final_states
        if returns_final and sequence_ids is not None:
            raise CtxError("Final states cannot be combined with sequence_ids: a row has one.")
        hidden, cell = _by_part(final) if returns_final else (None, None)
        return CtxCoveModelOutput(
            last_hidden_state=last if output_mask is None else last[output_mask],
            hidden_states=(vectors, *states[1:-1], last) if wants else None,
            final_hidden=hidden,
            final_cell=cell,
        )


def _by_part(final: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """(rows, 2, width) states of every layer -> (rows, layers, 2 * width) hidden and cell states."""
    hidden, cell = (torch.stack([part.flatten(1) for part in parts], 1) for parts in zip(*final, strict=True))
    return hidden, cell


class CtxCoveHeadModel(heads.HeadModel, CtxCovePreTrainedModel):
    """Binds the generic heads to the word vectors, concatenated with the encoder's states or not."""

    encoder_class = CtxCoveModel
    is_task_head: ClassVar[bool] = True

    def train(self, mode: bool = True) -> "CtxCoveHeadModel":
        """Set the mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.is_task_head and self.config.freeze_context and hasattr(self, self.base_model_prefix):
            self.base_model.eval()
        return self

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; without `config.task_context`, `last_hidden_state` holds the word vectors only."""
        if not self.is_task_head:
            return super().encode(**kwargs)
        if self.config.freeze_context:
            with torch.no_grad():
                outputs = super().encode(**kwargs)
        else:
            outputs = super().encode(**kwargs)
        if not self.config.task_context:
            outputs.last_hidden_state = outputs.last_hidden_state[..., : self.config.embedding_size]
        return outputs


class CtxCoveForSequenceClassification(heads.ForSequenceClassification, CtxCoveHeadModel):
    """The biattentive classification network (section 5), for one text or two."""

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """Create the encoder and the biattention, which pools."""
        self.biattention = Biattention(config.head_input_size, config.biattention_size, config.head_dropout)
        return CtxCoveModel(config)

    def build_head(self, config: CtxCoveConfig) -> None:
        """Maxout layers."""
        self.dropout = nn.Identity()  # dropout follows the normalisations
        self.classifier = MaxoutClassifier(
            config.pooler_size,
            2 * config.biattention_size,
            config.num_labels,
            pieces=config.maxout_pieces,
            dropout=config.head_dropout,
        )

    def encode(
        self,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the encoder on each text separately; `pooler_output` is from the biattention."""
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), attention_mask)
        words = self.check_word_input(*given, sequence_ids=sequence_ids, token_type_ids=token_type_ids)
        tokens = token_mask(words, attention_mask, sequence_ids)
        if token_type_ids is None:
            second, texts = torch.zeros_like(tokens), sequence_ids
        else:
            second = forward_fill_padding(token_type_ids != 0, tokens)
            texts = 1 + second.long() if sequence_ids is None else sequence_ids
        outputs = super().encode(
            attention_mask=attention_mask, token_type_ids=token_type_ids, sequence_ids=texts, **kwargs
        )
        states = outputs.last_hidden_state
        outputs.pooler_output = self.biattention(states, tokens, second, self.config.unpad and not is_traced(states))
        return outputs


class CtxCoveForTokenClassification(heads.ForTokenClassification, CtxCoveHeadModel):
    """A linear classifier on each word's embedding and hidden state."""
