"""CoVe (McCann et al. 2017, arXiv 1708.00107): frozen GloVe vectors, concatenated with the states of a bidirectional
LSTM that is pretrained on translation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    PretrainedEmbeddingEncoder,
    PretrainedEmbeddingPreTrainedModel,
)
from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, zero_padding
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced, on_host, select_true
from hf_ctxmodels.layers.biattention import Biattention, maxout_classifier
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import build_token_mask, forward_fill_padding
from hf_ctxmodels.layers.recurrent.decoders import AttentionalDecoder, reset_lstm_cell
from hf_ctxmodels.layers.recurrent.packing import run_bidirectional
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig


class CtxCovePreTrainedModel(PretrainedEmbeddingPreTrainedModel):
    """Base class of the CoVe models."""

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
        last_hidden_state: (batch, length, embedding + hidden): word vector and top layer's state, concatenated.
        hidden_states: The word vectors, the outputs of the lower layers, and `last_hidden_state`.
        final_hidden, final_cell: (batch, layers, hidden) final hidden and cell states, both directions concatenated.
    """

    final_hidden: Tensor | None = None
    final_cell: Tensor | None = None


class CtxCoveModel(PretrainedEmbeddingEncoder, CtxCovePreTrainedModel):
    """Pretrained word vectors and the MT-LSTM; the output is [GloVe(w); MT-LSTM(GloVe(w))] (section 4).

    With `returns_final_states`, `forward` returns the final states for a decoder by default.
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
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        Args:
            output_final_states: Return `final_hidden` and `final_cell`; None for `returns_final_states`.
            kwargs: Ignored arguments of other families' models.
        """
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            sequence_ids,
            output_mask,
            token_type_ids=token_type_ids,
            position_ids=kwargs.get("position_ids"),
        )
        embeddings = inputs.embed(self.word_embeddings)
        states, final_states = run_bidirectional(self.layers, embeddings, inputs.pack(2), self.dropout)
        vectors = zero_padding(embeddings, inputs.token_mask).to(states[-1].dtype)
        last = torch.cat([vectors, states[-1]], -1)
        if output_final_states is None:
            output_final_states = self.returns_final_states
        if output_final_states and sequence_ids is not None:
            raise CtxError("Final states cannot be combined with sequence_ids, which has several sequences per row.")
        hidden = cell = None
        if output_final_states:  # (batch, 2, width) states of each layer
            hidden, cell = (torch.stack([state.flatten(1) for state in layers], 1) for layers in zip(*final_states))
        returns_hidden_states = self.config.returns_hidden_states(output_hidden_states)
        return CtxCoveModelOutput(
            last_hidden_state=last if output_mask is None else select_true(last, output_mask),
            hidden_states=(vectors, *states[1:-1], last) if returns_hidden_states else None,
            final_hidden=hidden,
            final_cell=cell,
        )


class CtxCoveHeadModel(heads.HeadModel, CtxCovePreTrainedModel):
    """Base class of the heads on word vectors, which the encoder's states extend with `config.task_context`."""

    encoder_class = CtxCoveModel

    def train(self, mode: bool = True) -> "CtxCoveHeadModel":
        """Set the mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.config.freeze_context and hasattr(self, self.base_model_prefix):
            self.base_model.eval()
        return self

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; without `config.task_context`, `last_hidden_state` holds only the word vectors."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_context):
            outputs = super().encode(**kwargs)
        if not self.config.task_context:
            outputs.last_hidden_state = outputs.last_hidden_state[..., : self.config.embedding_size]
        return outputs


class CtxCoveForSequenceClassification(heads.ForSequenceClassification, CtxCoveHeadModel):
    """The biattentive classification network (section 5), for one text or two."""

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """Create the encoder and the biattention, which pools its states."""
        self.biattention = Biattention(config.head_input_size, config.biattention_size, config.head_dropout)
        return CtxCoveModel(config)

    def build_head(self, config: CtxCoveConfig) -> None:
        """Create three maxout layers, each after batch normalization and dropout, which would change its statistics."""
        self.dropout = nn.Identity()
        self.classifier = maxout_classifier(
            config.biattention_size, config.num_labels, config.maxout_pieces, config.head_dropout
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
        aligned = {"sequence_ids": sequence_ids, "token_type_ids": token_type_ids}
        words = self.check_input_of_any_length(
            kwargs.get("input_ids"), kwargs.get("inputs_embeds"), attention_mask, **aligned
        )
        token_mask = build_token_mask(words, attention_mask, sequence_ids)
        if token_type_ids is None:
            is_second_text = on_host(torch.zeros_like, token_mask)
        else:
            is_second_text = on_host(
                lambda types, mask: forward_fill_padding(types != 0, mask), token_type_ids, token_mask
            )
            if sequence_ids is None:
                sequence_ids = on_host(lambda mask: 1 + mask.long(), is_second_text)
        kwargs |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "sequence_ids": sequence_ids}
        outputs = super().encode(**kwargs)
        states = outputs.last_hidden_state
        unpad = self.config.unpad and not is_traced(states)
        outputs.pooler_output = self.biattention(states, token_mask, is_second_text, unpad)
        return outputs


class CtxCoveForTokenClassification(heads.ForTokenClassification, CtxCoveHeadModel):
    """A linear classifier of each word's embedding and hidden state."""


class CtxCoveForQuestionAnswering(heads.ForQuestionAnswering, CtxCoveHeadModel):
    """Start and end logits of each word's embedding and hidden state; question and context are one sequence."""


class CtxCoveForConditionalGeneration(heads.RecurrentForConditionalGeneration, CtxCovePreTrainedModel, GenerationMixin):
    """The translation model (section 3). The decoder starts from the encoder's final states."""

    encoder_class = CtxCoveModel
    required_encoder_outputs = ("last_hidden_state", "final_hidden", "final_cell")
    decoder: AttentionalDecoder

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """Create the encoder."""
        encoder = CtxCoveModel(config)
        encoder.returns_final_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """Create the decoder and the output layer."""
        self.decoder = AttentionalDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            dropout=config.hidden_dropout_prob,
            use_attention=config.decoder_attention,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def start(self, encoder_outputs: CtxCoveModelOutput) -> RecurrentCache:
        """The decoder's initial state: the encoder's final states."""
        assert encoder_outputs.final_hidden is not None  # both are in `required_encoder_outputs`
        assert encoder_outputs.final_cell is not None
        return self.decoder.start(encoder_outputs.final_hidden, encoder_outputs.final_cell)

    def decode(
        self, decoder_input_ids: Tensor, target_mask: Tensor | None, inputs: heads.RecurrentDecoderInputs
    ) -> RecurrentDecoderOutput:
        """Run the decoder on target ids, see `RecurrentForConditionalGeneration.decode`."""
        states = inputs.encoder_outputs.last_hidden_state
        memory, token_mask = states[..., self.config.embedding_size :], build_token_mask(states, inputs.attention_mask)
        if target_mask is None:
            return self.decoder(decoder_input_ids, memory, token_mask, inputs.cache, inputs.is_recording)
        return RecurrentDecoderOutput(
            self.decoder.target_states(decoder_input_ids, target_mask, memory, token_mask, inputs.cache)
        )
