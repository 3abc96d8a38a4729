"""ELMo (Peters et al. 2018, arXiv 1802.05365): a mix of the layers of a character-based bidirectional LSTM."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.character_models import (
    CharacterModel,
    CharacterPreTrainedModel,
    CharacterVectors,
    build_character_vectors,
    second_text_mask,
)
from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, run_stateful_layers
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host, select_true
from hf_ctxmodels.core.inputs import check_ids
from hf_ctxmodels.layers.common import ScalarMix
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import is_plain_linear, linear
from hf_ctxmodels.layers.lm_loss.sampling import sampled_softmax_loss
from hf_ctxmodels.layers.pooling import PoolingLayer, build_token_mask, pair_features, text_masks
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig


class CtxElmoPreTrainedModel(CharacterPreTrainedModel):
    """Base class of the ELMo models."""

    config: CtxElmoConfig
    base_model_prefix = "elmo"


@dataclass
class CtxElmoModelOutput(BaseModelOutputWithPooling):
    """Output of `CtxElmoModel`.

    Attributes:
        hidden_states: The token layer concatenated with itself, and the layers' outputs, both directions concatenated.
        past_key_values: Hidden state (batch, 2, hidden / 2) and cell state (batch, 2, cell) of each layer.
    """

    past_key_values: RecurrentCache | None = None


class CtxElmoModel(CharacterModel, CtxElmoPreTrainedModel):
    """A character encoder with forward and backward LSTM layers. `input_ids` include the sentence boundary tokens."""

    def __init__(self, config: CtxElmoConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.build_encoder(config, config.projection_size, config.projection_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CtxElmoModelOutput:
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        Args:
            inputs_embeds: (batch, words, hidden / 2) the token layer's output, instead of `input_ids`.
            past_key_values: The state after the preceding text, returned by a previous call; None for zeros.
            use_cache: Return `past_key_values`; None for `config.stateful`.
            kwargs: Ignored arguments of other families' models.
        """
        config = self.config
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            sequence_ids,
            output_mask,
            width=config.projection_size,
            position_ids=kwargs.get("position_ids"),
            past_key_values=past_key_values,
        )
        packing = inputs.pack(2)
        if input_ids is None or packing.step_mask is not None:
            packed = packing.pack(inputs.embed(self.embed_ids))
        else:  # encode the characters of each word once for both directions
            words = on_host(lambda ids, positions: ids.flatten(0, 1)[positions[0]], input_ids, packing.positions)
            packed = packing.add_directions(self.encode_words(words))
        returns_hidden_states = config.returns_hidden_states(output_hidden_states)
        layer_inputs, last, final_state = run_stateful_layers(
            self.layers,
            packed,
            packing,
            past_key_values,
            [(config.projection_size, config.cell_size)] * config.num_hidden_layers,
            layer_dropout=lambda states, depth: self.dropout(states),
            residual=config.residual,
            records_inputs=returns_hidden_states,
        )
        use_cache = sequence_ids is None and (config.stateful if use_cache is None else use_cache)
        return CtxElmoModelOutput(
            last_hidden_state=last if output_mask is None else select_true(last, output_mask),
            hidden_states=(*layer_inputs, last) if returns_hidden_states else None,
            past_key_values=final_state if use_cache else None,
        )


class CtxElmoHeadModel(heads.HeadModel, CtxElmoPreTrainedModel):
    """Base class of the heads on mixes of the encoder's layers, concatenated with word vectors (section 3.3)."""

    encoder_class = CtxElmoModel
    has_custom_layer_mix: ClassVar[bool] = True
    vectors: CharacterVectors

    def build_encoder(self, config: CtxElmoConfig) -> CtxElmoModel:
        """Create the encoder, the mixes of its layers and the pooling."""
        if self.has_custom_layer_mix:
            layers = config.num_hidden_layers + 1
            self.mixes: Any = nn.ModuleList(ScalarMix(layers, config.mix_layer_norm) for _ in range(config.num_mixes))
            if (vectors := build_character_vectors(config)) is not None:
                self.vectors = vectors
        if self.uses_pooled_output:
            self.pooler = PoolingLayer(config.pooling)
        return CtxElmoModel(config)

    def penalty(self) -> Tensor | None:
        """Weighted squared distance of the mixes from the average of the layers; None without `config.mix_decay`."""
        if not self.has_custom_layer_mix or not self.config.mix_decay:
            return None
        return self.config.mix_decay * torch.stack([mix.distance() for mix in self.mixes]).sum()

    def encode(self, *, attention_mask: Tensor | None = None, sequence_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder; `last_hidden_state` concatenates mixes and word vectors, and `pooler_output` pools it."""
        if not self.has_custom_layer_mix:
            return super().encode(attention_mask=attention_mask, sequence_ids=sequence_ids, **kwargs)
        returns_hidden_states = self.config.returns_hidden_states(kwargs.pop("output_hidden_states", None))
        kwargs |= {"attention_mask": attention_mask, "sequence_ids": sequence_ids, "output_hidden_states": True}
        outputs = super().encode(**kwargs)
        states = outputs.hidden_states
        token_mask = build_token_mask(states[0], attention_mask, sequence_ids)
        features = [mix(states, token_mask) for mix in self.mixes]
        if self.config.pretrained_embedding_size:
            if (input_ids := kwargs.get("input_ids")) is None:
                raise CtxError(
                    "The look-up of pretrained word vectors requires characters, not inputs_embeds.",
                    hint="pass input_ids, or use a head without pretrained_embeddings.",
                )
            features.append(self.vectors(input_ids).to(features[0].dtype))
        outputs.last_hidden_state = torch.cat(features, -1)
        if self.uses_pooled_output:
            outputs.pooler_output = self.pooler(outputs.last_hidden_state, token_mask)
        if not returns_hidden_states:
            outputs.hidden_states = None
        return outputs


class CtxElmoForPreTraining(CtxElmoHeadModel):
    """The bidirectional language model (section 3.1). Both directions share the token layer and the softmax weights."""

    has_custom_layer_mix = False
    output_layer_name = "decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    label_axes: ClassVar[tuple[str, ...]] = ("directions",)
    state_outputs: ClassVar[tuple[str, ...]] = ("past_key_values",)

    def build_head(self, config: CtxElmoConfig) -> None:
        """Create the dropout and the output layer."""
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.decoder = nn.Linear(config.projection_size, config.vocab_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the loss with `labels`, otherwise logits. Other arguments are described in `CtxElmoModel.forward`.

        Args:
            labels: (batch, words, 2) vocabulary ids of the next and the previous word; -100 is ignored.
            negatives: (batch, k) samples for a sampled softmax as the training loss, which uses the negatives of the
                whole batch (see `layers.lm_loss.sampling`).

        Returns:
            The cross-entropy in nats per target of both directions, or (batch, words, 2, vocabulary) logits.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds, 2)
        target_mask = None if labels is None else heads.mask_of_targets(labels)
        computes_all_positions = target_mask is None or self.needs_all_logits(return_logits)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        output_mask = None
        if target_mask is not None and not computes_all_positions:
            output_mask = on_host(lambda mask: mask.any(-1), target_mask)
        outputs = self.encode(past_key_values=past_key_values, use_cache=use_cache, output_mask=output_mask, **inputs)
        top = self.dropout(outputs.last_hidden_state).unflatten(-1, (2, self.config.projection_size))
        loss, logits = None, linear(self.decoder, top) if computes_all_positions else None
        if labels is not None and target_mask is not None:
            sampled_loss = None
            # adapters need the full softmax
            if negatives is not None and self.training and is_plain_linear(self.decoder):
                sampled_loss = partial(self._sampled_loss, negatives)
            if logits is not None and sampled_loss is None:
                loss = heads.loss_from_logits(logits, labels, num_items_in_batch)
            else:
                if not computes_all_positions:
                    target_mask = on_host(lambda mask: select_true(mask, mask.any(-1)), target_mask)
                loss = heads.language_modeling_loss(
                    self.decoder, select_true(top, target_mask), labels, num_items_in_batch, summed_loss=sampled_loss
                )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, past_key_values=outputs.past_key_values
        )

    def _sampled_loss(self, negatives: Tensor, states: Tensor, targets: Tensor) -> Tensor:
        check_ids("negatives", negatives, self.decoder.out_features, "vocab_size")
        return sampled_softmax_loss(states, self.decoder.weight, self.decoder.bias, targets, negatives)


class CtxElmoForSequenceClassification(heads.ForSequenceClassification, CtxElmoHeadModel):
    """ELMo with a classifier or regressor on the pooled mix of layers, of one text or, with `config.text_pairs`, of two
    texts that are encoded separately."""

    def encode(
        self,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the encoder, separately on both texts with `config.text_pairs`; `pooler_output` is the classifier's
        input. The second text has `token_type_ids` above 0; without them it begins at the second `<S>`."""
        if not self.config.text_pairs:
            return super().encode(attention_mask=attention_mask, sequence_ids=sequence_ids, **kwargs)
        input_ids = kwargs.get("input_ids")
        aligned = {"token_type_ids": token_type_ids, "sequence_ids": sequence_ids}
        inputs = self.check_input_of_any_length(
            input_ids, kwargs.get("inputs_embeds"), attention_mask, self.config.projection_size, **aligned
        )
        token_mask = build_token_mask(inputs, attention_mask, sequence_ids)
        if token_type_ids is not None:
            is_second = on_host(lambda types, mask: (types != 0) & mask, token_type_ids, token_mask)
        elif input_ids is not None:
            is_second = on_host(torch.logical_and, second_text_mask(input_ids), token_mask)
        else:
            is_second = on_host(torch.zeros_like, token_mask)
        if sequence_ids is None:
            sequence_ids = on_host(lambda mask, second: mask.long() + second, token_mask, is_second)
        outputs = super().encode(attention_mask=attention_mask, sequence_ids=sequence_ids, **kwargs)
        texts = text_masks(token_mask, is_second).chunk(2)
        outputs.pooler_output = pair_features(*(self.pooler(outputs.last_hidden_state, text) for text in texts))
        return outputs


class CtxElmoForTokenClassification(heads.ForTokenClassification, CtxElmoHeadModel):
    """ELMo with a classifier of each word's mix of layers."""


class CtxElmoForQuestionAnswering(heads.ForQuestionAnswering, CtxElmoHeadModel):
    """ELMo with start and end logits of each word's mix of layers; question and context are one sequence."""
