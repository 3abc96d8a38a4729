"""LSTM language models: the encoder, and the head that predicts the next word. A family defines its layers, dropout and
regularization terms."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig
from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, run_stateful_layers
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host, select_true
from hf_ctxmodels.core.inputs import packed_sequence_ids, reject_unused_tensors
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import ItemCounts, mean_over_targets
from hf_ctxmodels.heads.causal_lm import ForCausalLM
from hf_ctxmodels.heads.stateful_generation import StatefulGeneration
from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.pooling import Pooling, build_token_mask, pool_tokens
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
        hidden_states: The embeddings and the outputs of the layers, with the widths in `config.layer_sizes`.
        past_key_values: Hidden and cell state of each layer after the last token of a row, (batch, 1, width) each.
        regularization_loss: In training of a language model, the sum of the additional loss terms; else None.
    """

    past_key_values: RecurrentCache | None = None
    regularization_loss: Tensor | None = None


class LSTMLanguageModel(LSTMLanguageModelPreTrainedModel):
    """Word embeddings and unidirectional LSTM layers, with the widths in `config.layer_sizes`.

    A family with a `pooling` of the token states returns `pooler_output`.
    """

    pooling: ClassVar[Pooling | None] = None

    def __init__(self, config: CtxLSTMLanguageModelConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.layer_sizes[0])
        self.layers = nn.ModuleList(self.build_layer(*widths) for widths in pairwise(config.layer_sizes))
        self.post_init()

    @property
    def is_backward(self) -> bool:
        """Whether the model reads from right to left."""
        return False

    def build_layer(self, input_size: int, output_size: int) -> LSTM:
        """Create a layer."""
        return LSTM(input_size, output_size, directions=1, state_bias=True)

    def embed(self, ids: Tensor) -> Tensor:
        """(1, tokens) packed ids -> (1, tokens, width) embeddings after dropout."""
        return self.word_embeddings(ids)

    def layer_dropout(self, packed: Tensor, packing: PackedSequences, depth: int) -> Tensor:
        """Dropout of (1, tokens, width), the packed input of the layer at `depth`; by default between layers."""
        return dropout(packed, self.config.hidden_dropout_prob if depth else 0.0, self.training)

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
            width=config.layer_sizes[0],
            position_ids=kwargs.get("position_ids"),
            past_key_values=past_key_values,
        )
        returns_hidden_states = config.returns_hidden_states(output_hidden_states)
        packing = inputs.pack(2).select_direction("backward") if self.is_backward else inputs.pack(1)
        packed = packing.pack(inputs.tokens)
        hidden_states, last, cache = run_stateful_layers(
            self.layers[:layers],
            self.embed(packed) if inputs.are_ids else packed,
            packing,
            past_key_values,
            [(size, size) for size in config.layer_sizes[1:]],
            layer_dropout=lambda states, depth: self.layer_dropout(states, packing, depth),
            truncation=truncation,
            records_inputs=returns_hidden_states,
        )
        use_cache = sequence_ids is None and (config.stateful if use_cache is None else use_cache)
        return LSTMLanguageModelOutput(
            last_hidden_state=last if output_mask is None else select_true(last, output_mask),
            pooler_output=None if self.pooling is None else pool_tokens(last, inputs.token_mask, self.pooling),
            hidden_states=(*hidden_states, last) if returns_hidden_states else None,
            past_key_values=cache if use_cache else None,
        )


class LSTMForCausalLM(StatefulGeneration, ForCausalLM):
    """Predicts each word from the words before it; `past_key_values` is the recurrent state."""

    output_layer_name = "decoder"
    _is_stateful = True  # tokens cannot be removed from a state, as assisted generation would need

    def build_head(self, config: CtxLSTMLanguageModelConfig) -> None:
        """Create the output layer."""
        self.decoder = nn.Linear(config.layer_sizes[-1], config.vocab_size)

    def output_dropout(self, states: Tensor) -> Tensor:
        """Dropout of (batch, length, hidden), the input of `decoder`."""
        return dropout(states, self.config.hidden_dropout_prob, self.training)

    def regularization_loss(
        self, states: Tensor, dropped_states: Tensor, target_mask: Tensor, is_same_sequence: Tensor
    ) -> Tensor | None:
        """The terms that training adds to the summed cross-entropy.

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

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether Trainer can smooth the loss; not of a backward model, since Trainer compares with the next tokens."""
        return super().supports_label_smoothing and not self.is_backward

    def encode_for_targets(self, target_mask: Tensor | None, computes_logits: bool, **inputs: Any) -> Any:
        """Run the encoder on all words, which the regularization terms need; `last_hidden_state` is after
        `output_dropout`. Without a mask and a cache, `position_ids` separate packed sequences (`packed_sequence_ids`);
        otherwise each row must have one sequence. Raises CtxError for the `prefix_mask` of a Transformer decoder, which
        would be ignored."""
        reject_unused_tensors(prefix_mask=inputs.pop("prefix_mask", None))
        position_ids = inputs.get("position_ids")
        tokens = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        masks = ("attention_mask", "sequence_ids", "past_key_values")
        if not (position_ids is None or tokens is None) and all(inputs.get(name) is None for name in masks):
            inputs["sequence_ids"] = packed_sequence_ids(position_ids, tokens.shape[:2])
        attention_mask, sequence_ids = inputs.get("attention_mask"), inputs.get("sequence_ids")
        if target_mask is not None:
            ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
            self.check_encoder_input(
                ids, embeddings, attention_mask, None, sequence_ids=sequence_ids, output_mask=target_mask
            )
        outputs = self.encode(**inputs)
        states = outputs.last_hidden_state
        outputs.last_hidden_state = dropped_states = self.output_dropout(states)
        if target_mask is not None and self.training:
            token_mask = build_token_mask(states, attention_mask, sequence_ids)
            is_same_sequence = on_host(lambda mask: mask[:, 1:] & mask[:, :-1], token_mask)
            if sequence_ids is not None:
                is_same_sequence = on_host(
                    lambda same, numbers: same & (numbers[:, 1:] == numbers[:, :-1]), is_same_sequence, sequence_ids
                )
            outputs.regularization_loss = self.regularization_loss(
                states, dropped_states, target_mask, is_same_sequence
            )
        if target_mask is not None and not computes_logits:
            outputs.last_hidden_state = select_true(dropped_states, target_mask)
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
            message = "A backward language model cannot continue a text at its end."
            raise CtxError(message, hint="generate with a forward model.")
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if attention_mask is not None:
            tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["attention_mask"] = attention_mask[:, -tokens.shape[1] :]
        return inputs
