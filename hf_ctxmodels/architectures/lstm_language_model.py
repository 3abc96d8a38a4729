"""LSTM language models: the encoder, and the head that predicts the next word.

A family defines its dropout (`embed`, `layer_dropout`, `output_dropout`), its layers, and the regularization terms of
its loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig
from hf_ctxmodels.architectures.recurrent_inputs import prepare_inputs
from hf_ctxmodels.core.caches import RecurrentCache, validate_cache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import ItemCounts, mean_over_targets
from hf_ctxmodels.heads.causal_lm import ForCausalLM
from hf_ctxmodels.layers.pooling import Pooling, pool_tokens, token_mask
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM


class LSTMLanguageModelPreTrainedModel(CtxPreTrainedModel):
    """Base class of LSTM language models and of their heads."""

    config: CtxLSTMLanguageModelConfig
    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs
    _input_embed_layer = "word_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -self.config.initializer_range, self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)  # `initializer_range` is for embeddings
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)


@dataclass
class LSTMLanguageModelOutput(BaseModelOutputWithPooling):
    """Output of `LSTMLanguageModel`.

    Attributes:
        last_hidden_state: (batch, length, hidden) of the last layer, before dropout.
        pooler_output: (batch, hidden) for families with a `pooling`; else None.
        hidden_states: The embeddings and the outputs of the layers, with the widths in `config.layer_sizes`.
        past_key_values: Hidden and cell state of each layer after the last token of a row, (batch, 1, width) each.
        regularization_loss: In training of a language model, the sum of the additional loss terms; else None.
    """

    past_key_values: RecurrentCache | None = None
    regularization_loss: Tensor | None = None


class LSTMLanguageModel(LSTMLanguageModelPreTrainedModel):
    """Word embeddings and unidirectional LSTM layers, with the widths in `config.layer_sizes`.

    Attributes:
        pooling: Pooling of the token states to `pooler_output`; None for none.
    """

    pooling: ClassVar[Pooling | None] = None

    @property
    def is_backward(self) -> bool:
        """Whether the model reads from right to left."""
        return False

    def __init__(self, config: CtxLSTMLanguageModelConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.layer_sizes[0])
        self.layers = nn.ModuleList(self.build_layer(*widths) for widths in pairwise(config.layer_sizes))
        self.post_init()

    def build_layer(self, input_size: int, output_size: int) -> LSTM:
        """Create a layer."""
        return LSTM(input_size, output_size, directions=1, state_bias=True)

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, tokens) packed ids -> (directions, tokens, width) embeddings after dropout."""
        return self.word_embeddings(ids)

    def layer_dropout(self, packed: Tensor, packing: PackedSequences, depth: int) -> Tensor:
        """Dropout of (directions, tokens, width), the packed input of the layer at `depth`."""
        return packed

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        truncation: int | None = None,
        layers: int | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LSTMLanguageModelOutput:
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        Args:
            past_key_values: The state after the preceding text, returned by an earlier forward; None for zeros.
            use_cache: Return `past_key_values`; None for `config.stateful`.
            truncation: Number of steps to back-propagate through; None for all.
            layers: Number of layers to run, whose last one computes `last_hidden_state`; None for all.
            output_hidden_states: Return `hidden_states`.
            kwargs: Ignored arguments of other families' models.
        """
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            sequence_ids,
            width=self.config.layer_sizes[0],
            output_mask=output_mask,
        )
        if sequence_ids is not None:
            if past_key_values is not None:
                raise CtxError("past_key_values cannot be combined with sequence_ids: a cache has one state per row.")
            use_cache = False
        if use_cache is None:
            use_cache = self.config.stateful
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        packing = inputs.pack(2).backward_only() if self.is_backward else inputs.pack(1)
        packed = packing.pack(inputs.words)
        if inputs.are_ids:
            packed = self.embed(packed)
        hidden_states, last, cache = self._run_layers(
            packed, packing, past_key_values, truncation, self.layers[:layers], output_hidden_states
        )
        return LSTMLanguageModelOutput(
            last_hidden_state=last if output_mask is None else last[output_mask],
            pooler_output=None if self.pooling is None else pool_tokens(last, inputs.tokens, self.pooling),
            hidden_states=(*hidden_states, last) if output_hidden_states else None,
            past_key_values=cache if use_cache else None,
        )

    def _run_layers(
        self,
        packed: Tensor,
        packing: PackedSequences,
        cache: RecurrentCache | None,
        truncation: int | None,
        layers: Iterable[nn.Module],
        output_hidden_states: bool,
    ) -> tuple[list[Tensor], Tensor, RecurrentCache]:
        """Return the input of each layer if requested and the last output, (batch, length, width) each, and the state
        after the last token."""
        num_past_tokens, length = 0, packing.shape[1]
        initial_states: list[tuple[Tensor, ...] | None] = [None] * len(self.layers)
        if cache is not None:
            validate_cache(cache, [[(packing.shape[0], 1, size)] * 2 for size in self.config.layer_sizes[1:]])
            num_past_tokens = cache.seen_tokens
            initial_states = [packing.pack_state(state) for state in cache.states]
        hidden_states, final_states = [], []
        for depth, layer in enumerate(layers):
            if output_hidden_states:
                hidden_states.append(packing.unpack(packed)[0])
                packed = packing.repack(hidden_states[-1][None])  # so that gradients reach the recorded states
            layer_input = self.layer_dropout(packed, packing, depth)
            packed, state = layer(layer_input, packing, initial_states[depth], truncation)
            final_states.append(packing.unpack_state(state))
        return hidden_states, packing.unpack(packed)[0], RecurrentCache(final_states, num_past_tokens + length)


class LSTMForCausalLM(ForCausalLM):
    """Predicts each word from the words before it; `past_key_values` is the recurrent state."""

    output_layer = "decoder"
    state_outputs: ClassVar[tuple[str, ...]] = ("past_key_values",)
    _is_stateful = True  # tokens cannot be removed from a state, as assisted generation would need

    def build_head(self, config: CtxLSTMLanguageModelConfig) -> None:
        """Create the output layer."""
        self.decoder = nn.Linear(config.layer_sizes[-1], config.vocab_size)

    def output_dropout(self, states: Tensor) -> Tensor:
        """Dropout of (batch, length, hidden), the input of `decoder`."""
        return states

    def regularization_loss(
        self, states: Tensor, dropped_states: Tensor, target_mask: Tensor, is_same_sequence: Tensor
    ) -> Tensor | None:
        """The terms that training adds to the summed cross-entropy; None for none.

        Args:
            states, dropped_states: (batch, length, hidden) output of the last layer before and after dropout.
            target_mask: (batch, length) bool, True at words with a target.
            is_same_sequence: (batch, length - 1) bool, True where two adjacent words belong to the same sequence.
        """
        return None

    @property
    def is_backward(self) -> bool:
        """Whether the encoder reads from right to left."""
        return self.base_model.is_backward

    def encode_for_targets(self, target_mask: Tensor | None, computes_logits: bool, **inputs: Any) -> Any:
        """Run the encoder on all words, which the regularization terms need; `last_hidden_state` is after
        `output_dropout`."""
        attention_mask, sequence_ids = inputs.get("attention_mask"), inputs.get("sequence_ids")
        if target_mask is not None:
            self.check_encoder_input(
                inputs.get("input_ids"),
                inputs.get("inputs_embeds"),
                attention_mask,
                None,
                sequence_ids=sequence_ids,
                output_mask=target_mask,
            )
        outputs = self.encode(**inputs)
        states = outputs.last_hidden_state
        outputs.last_hidden_state = dropped_states = self.output_dropout(states)
        if target_mask is not None and self.training:
            is_same_sequence = _same_sequence(token_mask(states, attention_mask, sequence_ids), sequence_ids)
            outputs.regularization_loss = self.regularization_loss(
                states, dropped_states, target_mask, is_same_sequence
            )
        if not computes_logits:
            outputs.last_hidden_state = dropped_states[target_mask]
        return outputs

    def next_token_loss(
        self, outputs: Any, targets: Tensor, num_items: ItemCounts, logits: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats per target, in training with the regularization terms."""
        loss = super().next_token_loss(outputs, targets, num_items, logits)
        if outputs.regularization_loss is None:
            return loss
        return loss + mean_over_targets(outputs.regularization_loss, targets, "labels", num_items)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens after the tokens in the cache, and their mask; raises CtxError for a backward model."""
        if self.is_backward:
            raise CtxError(
                "A backward language model cannot continue a text at its end.",
                hint="generate with a forward model.",
            )
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if attention_mask is not None:
            tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["attention_mask"] = attention_mask[:, -tokens.shape[1] :]
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward creates the cache


def _same_sequence(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length - 1) bool: True where two adjacent words belong to the same sequence."""
    are_tokens = tokens[:, 1:] & tokens[:, :-1]
    return are_tokens if sequence_ids is None else are_tokens & (sequence_ids[:, 1:] == sequence_ids[:, :-1])
