"""CoVe (McCann et al. 2017, arXiv 1708.00107): word vectors, and what a translation model's encoder makes of them.

Its own here: what is read beside what, and which part learns. The arithmetic is in
`hf_ctxmodels.layers.recurrent.lstm`, `attentional_decoder` and `biattention`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent.attentional_decoder import reset_cell
from hf_ctxmodels.layers.recurrent.lstm import LSTM, State
from hf_ctxmodels.models._shared.pretrained_embeddings import (
    PretrainedEmbeddingEncoder,
    PretrainedEmbeddingPreTrainedModel,
)
from hf_ctxmodels.models._shared.recurrent import check_words, rows_of, run_both_ways, side_by_side
from hf_ctxmodels.models.cove.biattention import Biattention, MaxoutClassifier
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig


class CtxCovePreTrainedModel(PretrainedEmbeddingPreTrainedModel):
    """CoVe's part of the model base."""

    config: CtxCoveConfig
    base_model_prefix = "cove"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LSTMCell):
            reset_cell(module)
        else:
            super()._init_weights(module)


@dataclass
class CtxCoveModelOutput(BaseModelOutputWithPooling):
    """Output of `CtxCoveModel`.

    Attributes:
        last_hidden_state: (batch, length, embedding + hidden): the word's vector, and behind it the top layer's states.
        pooler_output: None.
        hidden_states: Layers + 1 of them: the vectors, the layers below the top, and `last_hidden_state`.
        final_hidden, final_cell: (batch, layers, hidden) every layer's state where each direction ends.
    """

    final_hidden: Tensor | None = None
    final_cell: Tensor | None = None


class CtxCoveModel(PretrainedEmbeddingEncoder, CtxCovePreTrainedModel):
    """Fixed word vectors and the MT-LSTM; its output is [GloVe(w); MT-LSTM(GloVe(w))] (section 4).

    Attributes:
        gives_states: Whether `forward` gives the states where a row ends, which a decoder starts from.
    """

    gives_states = False

    def __init__(self, config: CtxCoveConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.build_vectors(config)
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
        use_states: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CtxCoveModelOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, embedding) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding, which does not enter any state.
            token_type_ids: (batch, length), 0 for a first text and 1 for a second one: for heads that tell them apart.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, width).
            use_states: Give `final_hidden` and `final_cell`; None for `gives_states`.
            output_hidden_states: Give `hidden_states`.
            kwargs: What other families' models read, such as `position_ids`.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        aligned = {"sequence_ids": sequence_ids, "output_mask": output_mask, "token_type_ids": token_type_ids}
        given = check_words(self, input_ids, inputs_embeds, attention_mask, **aligned)
        rows = rows_of(self.config, given, attention_mask, sequence_ids, 2)
        read = given if input_ids is None else self.word_embeddings(input_ids)
        states, after = run_both_ways(self.layers, read, rows, self.dropout)
        vectors = (states[0] * token_mask(given, attention_mask, sequence_ids)[..., None]).to(states[-1].dtype)
        last = torch.cat([vectors, states[-1]], -1)
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        use_states = self.gives_states if use_states is None else use_states
        if use_states and sequence_ids is not None:
            raise CtxError("use_states asks for the state behind a row, but sequence_ids say it is several sequences.")
        hidden, cell = _final(after) if use_states else (None, None)
        return CtxCoveModelOutput(
            last_hidden_state=last if output_mask is None else last[output_mask],
            hidden_states=(vectors, *states[1:-1], last) if wants else None,
            final_hidden=hidden,
            final_cell=cell,
        )


def _final(states: list[State]) -> tuple[Tensor, Tensor]:
    """(rows, layers, hidden) last outputs and cells of all layers."""
    hidden, cell = (torch.stack([side_by_side(part) for part in parts], 1) for parts in zip(*states, strict=True))
    return hidden, cell


class CtxCoveHeadModel(heads.HeadModel, CtxCovePreTrainedModel):
    """Binds the generic heads to the vectors and the encoder's states, or to the vectors alone."""

    encoder_class = CtxCoveModel
    for_tasks: ClassVar[bool] = True

    def train(self, mode: bool = True) -> "CtxCoveHeadModel":
        """A frozen encoder has no dropout."""
        super().train(mode)
        if self.for_tasks and self.config.freeze_context and hasattr(self, self.base_model_prefix):
            self.base_model.eval()
        return self

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; `last_hidden_state` is what the configuration says a task reads."""
        if not self.for_tasks:
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
        """The encoder; what pools stands beside it."""
        self.biattention = Biattention(config.task_size, config.biattention_size, config.head_dropout)
        return CtxCoveModel(config)

    def build_head(self, config: CtxCoveConfig) -> None:
        """Maxout layers."""
        self.dropout = Dropout(0.0)  # it stands behind the normalisations
        self.classifier = MaxoutClassifier(
            config.pooled_size,
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
        """Run the encoder, over a second text anew; `pooler_output` is what the biattention pools."""
        apart = sequence_ids
        if token_type_ids is not None and sequence_ids is None:
            apart = 1 + token_type_ids
        outputs = super().encode(
            attention_mask=attention_mask, token_type_ids=token_type_ids, sequence_ids=apart, **kwargs
        )
        states = outputs.last_hidden_state
        tokens = token_mask(states, attention_mask, sequence_ids)
        second = torch.zeros_like(tokens) if token_type_ids is None else token_type_ids != 0
        unpad = self.config.unpad and not is_traced(states)
        outputs.pooler_output = self.biattention(states, tokens, second & tokens, unpad)
        return outputs


class CtxCoveForTokenClassification(heads.ForTokenClassification, CtxCoveHeadModel):
    """A linear classifier on each word's vector and the encoder's state."""
