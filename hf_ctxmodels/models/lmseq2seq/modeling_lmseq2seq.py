"""Encoder-decoder initialized with two language models (Ramachandran et al. 2016, arXiv 1611.02683).

The decoder attends to two layers of the encoder and has a residual connection around its upper layers.
"""

from collections.abc import Container
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelOutput,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.config import convert_config_errors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import select_true
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.dropout import Dropout, dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.pooling import build_token_mask, mask_until_last_target
from hf_ctxmodels.layers.recurrent.decoders import global_attention
from hf_ctxmodels.models.lmseq2seq.configuration_lmseq2seq import CtxLmSeq2SeqConfig


@dataclass
class CtxLmSeq2SeqModelOutput(LSTMLanguageModelOutput):
    """Output of `LSTMLanguageModel`, and inputs of the decoder.

    Attributes:
        memory: (batch, length, 2 * hidden) concatenated outputs of the last pretrained layer and the top layer.
        final: (batch, layers, 2, hidden) hidden and cell state of each layer after the last token.
    """

    memory: Tensor | None = None
    final: Tensor | None = None


class CtxLmSeq2SeqModel(LSTMLanguageModel):
    """Word embeddings and LSTM layers of the encoder or the decoder.

    With `returns_decoder_inputs`, `forward` returns `memory` and `final`.
    """

    config: CtxLmSeq2SeqConfig
    base_model_prefix = "encoder"
    pooling = "last"
    returns_decoder_inputs = False

    def embed(self, ids: Tensor) -> Tensor:
        """(1, words) ids -> (1, words, embedding), with dropout."""
        return dropout(self.word_embeddings(ids), self.config.hidden_dropout_prob, self.training)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> LSTMLanguageModelOutput:
        """Encode a batch; arguments as in `LSTMLanguageModel.forward`."""
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, "return_dict": True}
        if not self.returns_decoder_inputs:
            return super().forward(input_ids, output_hidden_states=output_hidden_states, use_cache=use_cache, **kwargs)
        outputs = super().forward(input_ids, output_hidden_states=True, use_cache=True, **kwargs)
        if outputs.past_key_values is None:
            raise CtxError("Final states cannot be combined with sequence_ids, which has several sequences per row.")
        layers = outputs.hidden_states
        return CtxLmSeq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=layers if self.config.returns_hidden_states(output_hidden_states) else None,
            memory=torch.cat([layers[self.config.pretrained_layers], layers[-1]], -1),
            final=torch.stack([torch.cat(state, 1) for state in outputs.past_key_values.states], 1),
        )


class CtxLmSeq2SeqForConditionalGeneration(
    heads.RecurrentForConditionalGeneration, LSTMLanguageModelPreTrainedModel, GenerationMixin
):
    """The translation model (figures 1 and 2).

    The next word is predicted from h~, with the states of the last pretrained layer (the first in the paper) and of the
    top layer, h^1, h^N of the decoder and H^1, H^N of the encoder:

        alpha = softmax(H^N (W1 h^N + b1)),  c = [H^1T alpha; H^NT alpha],  h~ = tanh(W2 [c; h^N] + b2) + h^1

    The decoder starts from the encoder's final states. In a new model, `load_pretrained_components` copies the weights
    of `config.source_model` and `config.target_model`.
    """

    config: CtxLmSeq2SeqConfig
    base_model_prefix = "encoder"
    encoder_class = CtxLmSeq2SeqModel
    required_encoder_outputs = ("last_hidden_state", "memory", "final")

    def build_encoder(self, config: CtxLmSeq2SeqConfig) -> CtxLmSeq2SeqModel:
        """Create the encoder."""
        encoder = CtxLmSeq2SeqModel(config)
        encoder.returns_decoder_inputs = True
        return encoder

    def build_head(self, config: CtxLmSeq2SeqConfig) -> None:
        """Create the decoder's layers, its attention and the output layer."""
        self.decoder = CtxLmSeq2SeqModel(config.decoder_config())
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.combine = nn.Linear(config.memory_size + config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def load_pretrained_components(self, missing: Container[str] | None = None) -> None:
        """Copy the weights of `config.source_model` and `config.target_model`."""
        super().load_pretrained_components(missing)
        if self.config.source_model is not None:
            output_layer = getattr(self, "source_prediction", None)  # in pretraining
            self._copy_weights(self.config.source_model, self.encoder, output_layer, missing)
        if self.config.target_model is not None:
            self._copy_weights(self.config.target_model, self.decoder, self.prediction, missing)

    @torch.no_grad()
    def _copy_weights(
        self, source: str, stack: Any, output_layer: nn.Linear | None, missing: Container[str] | None
    ) -> None:
        """Copy a language model's weights into the parameters that are `missing`, or all."""
        num_layers = self.config.pretrained_layers
        modules = {
            "word_embeddings": stack.word_embeddings if "embeddings" in self.config.pretrained_parts else None,
            "layers": stack.layers[:num_layers] if "layers" in self.config.pretrained_parts else None,
            "decoder": output_layer if "softmax" in self.config.pretrained_parts else None,
        }
        missing_ids = {id(value) for name, value in self.named_parameters() if missing is None or name in missing}
        parameters = {  # by the names in the language model
            f"{prefix}.{name}": parameter
            for prefix, module in modules.items()
            if module is not None
            for name, parameter in module.named_parameters()
            if id(parameter) in missing_ids
        }
        if not parameters:
            return
        model = _load_language_model(source)
        weights = {f"decoder.{name}": weight for name, weight in model.decoder.state_dict().items()}
        weights |= model.base_model.state_dict()
        if len(model.base_model.layers) != num_layers:
            raise CtxError(
                f"The language model has {len(model.base_model.layers)} layers, pretrained_layers={num_layers}.",
                location=source,
            )
        for name, parameter in parameters.items():
            shape = tuple(weights[name].shape) if name in weights else None
            if shape != tuple(parameter.shape):
                raise CtxError(
                    f"{name} of the language model is {shape}, expected {tuple(parameter.shape)}.",
                    location=source,
                    hint="use the tokenizer, embedding_size and hidden_size of the language model.",
                )
            parameter.copy_(weights[name])

    @classmethod
    def from_pretrained_pair(cls, source: str | PathLike[str], target: str | PathLike[str], **changes: Any) -> Self:
        """Create the translation model from two forward LSTM language models of the same shape, directories or Hub ids;
        `changes` are other fields of the configuration.

        Raises:
            CtxError: The language models cannot be loaded or do not match.
        """
        source_config, target_config = _load_language_model(source).config, _load_language_model(target).config
        fields = {
            "vocab_size": source_config.vocab_size,
            "target_vocab_size": target_config.vocab_size,
            "embedding_size": source_config.layer_sizes[0],
            "hidden_size": source_config.hidden_size,
            "pretrained_layers": source_config.num_hidden_layers,
        }
        with convert_config_errors(location=f"{source}, {target}"):
            config = CtxLmSeq2SeqConfig(source_model=str(source), target_model=str(target), **{**fields, **changes})
        model = cls(config)
        model.load_pretrained_components()
        return model.eval()

    def start(self, encoder_outputs: CtxLmSeq2SeqModelOutput) -> RecurrentCache:
        """The decoder's initial state: the encoder's final states."""
        assert encoder_outputs.final is not None  # in `required_encoder_outputs`
        return RecurrentCache(state.split(1, 1) for state in encoder_outputs.final.unbind(1))

    def decode(
        self, decoder_input_ids: Tensor, target_mask: Tensor | None, inputs: heads.RecurrentDecoderInputs
    ) -> RecurrentDecoderOutput:
        """Run the decoder on target ids, see `RecurrentForConditionalGeneration.decode`."""
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=None if target_mask is None else mask_until_last_target(target_mask),
            past_key_values=inputs.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        hidden, memory = outputs.last_hidden_state, inputs.encoder_outputs.memory
        keys = memory[..., -self.config.hidden_size :]
        padding = ~build_token_mask(keys, inputs.attention_mask)
        values = memory if self.config.multi_layer_attention else keys
        context, weights = global_attention(linear(self.query, hidden), keys, values, padding)
        features = torch.cat([context, hidden.to(keys.dtype)], -1)
        lower_states = outputs.hidden_states[self.config.pretrained_layers]
        if target_mask is not None:
            features, lower_states = select_true(features, target_mask), select_true(lower_states, target_mask)
        states = linear(self.combine, self.dropout(features)).tanh()
        if self.config.residual:
            states = states + lower_states
        recorded = ((*outputs.hidden_states[:-1], states), (weights[:, None],)) if inputs.is_recording else ()
        return RecurrentDecoderOutput(self.dropout(states), outputs.past_key_values, *recorded)


def _load_language_model(source: str | PathLike[str]) -> Any:
    """Load an LSTM language model; raises CtxError for other models."""
    model = load_pretrained(AutoModelForCausalLM, source, "the language model")
    if not isinstance(model, LSTMForCausalLM):
        raise CtxError(f"{type(model).__name__} is not a forward LSTM language model.", location=str(source))
    return model


@dataclass
class CtxLmSeq2SeqForPreTrainingOutput(heads.ConditionalGenerationOutput):
    """Output of `CtxLmSeq2SeqForPreTraining`; `loss` is the sum of the three losses.

    Attributes:
        translation_loss, source_lm_loss, target_lm_loss: Cross-entropies in nats per target, detached.
        source_logits: (batch, length, vocabulary) of the source language model; None with targets and in `generate`.
        target_logits: (batch, steps, target vocabulary) of the target language model; None in the same cases.
    """

    translation_loss: Tensor | None = None
    source_lm_loss: Tensor | None = None
    target_lm_loss: Tensor | None = None
    source_logits: Tensor | None = None
    target_logits: Tensor | None = None


class CtxLmSeq2SeqForPreTraining(CtxLmSeq2SeqForConditionalGeneration, GenerationMixin):
    """The translation model, whose pretrained layers are also trained as language models, which reduces forgetting."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "source_labels", "target_labels")
    accepts_loss_kwargs = False
    output_layer_name = "source_prediction"

    def build_head(self, config: CtxLmSeq2SeqConfig) -> None:
        """Create the decoder and the output layers."""
        super().build_head(config)
        self.source_prediction = nn.Linear(config.hidden_size, config.vocab_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        source_labels: Tensor | None = None,
        target_labels: Tensor | None = None,
        encoder_outputs: Any = None,
        use_cache: bool = False,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxLmSeq2SeqForPreTrainingOutput:
        """Compute the losses with `labels`, otherwise logits.

        Other arguments as in `RecurrentForConditionalGeneration.forward`.

        Args:
            source_labels: (batch, length) next source word of each position; -100 is ignored. None omits the source
                language model.
            target_labels: (batch, steps) next target words, predicted by the decoder's pretrained layers. None omits
                the target language model.
        """
        if encoder_outputs is None:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encode(**inputs, **kwargs)
        translation = super().forward(
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            labels=labels,
            encoder_outputs=encoder_outputs,
            use_cache=use_cache,
            num_items_in_batch=num_items_in_batch,
            return_logits=return_logits,
            **{**kwargs, "return_dict": True},
        )
        output = CtxLmSeq2SeqForPreTrainingOutput(**translation)
        if labels is None and use_cache:
            return output
        source = encoder_outputs.memory[..., : self.config.hidden_size]
        ids = self.resolve_decoder_input_ids(encoder_outputs.last_hidden_state.shape[0], decoder_input_ids, labels)
        if labels is None:
            output["source_logits"] = self.source_prediction(self.dropout(source))
            output["target_logits"] = self.prediction(self.dropout(self._target_states(ids, None)))
            return output
        losses: dict[str, Any] = {"translation_loss": translation.loss}
        if source_labels is not None:
            losses["source_lm_loss"] = self._language_model_loss(
                self.source_prediction, source, source_labels, "source_labels", num_items_in_batch, attention_mask
            )
        if target_labels is not None:
            target_labels = heads.validate_targets(target_labels, "target_labels", ids.shape)
            states = self._target_states(ids, heads.mask_of_targets(target_labels))
            losses["target_lm_loss"] = self._language_model_loss(
                self.prediction, states, target_labels, "target_labels", num_items_in_batch
            )
        output["loss"] = torch.stack([*losses.values()]).sum()
        for name, loss in losses.items():
            output[name] = loss.detach()
        return output

    def _target_states(self, ids: Tensor, target_mask: Tensor | None) -> Tensor:
        """(batch, steps, hidden) states of the decoder's pretrained layers, which do not depend on the source."""
        mask = None if target_mask is None else mask_until_last_target(target_mask)
        layers = self.config.pretrained_layers
        return self.decoder(input_ids=ids, attention_mask=mask, layers=layers).last_hidden_state

    def _language_model_loss(
        self,
        output_layer: nn.Linear,
        states: Tensor,
        labels: Tensor,
        name: str,
        num_items: heads.ItemCounts,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy of a language model."""
        labels = heads.validate_targets(labels, name, states.shape[:2])
        target_mask = heads.mask_of_targets(labels)
        self.check_encoder_input(None, states, attention_mask, None, output_mask=target_mask)
        states = self.dropout(select_true(states, target_mask))
        return heads.language_modeling_loss(output_layer, states, labels, num_items, name)
