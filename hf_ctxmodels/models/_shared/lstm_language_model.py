"""The model of families that read words from left to right: vectors, LSTMs, and the language model on them.

A family says what is dropped where (`embed`, `layer_dropout`, `output_dropout`), what a layer is, and what its
language model adds to the cross-entropy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.layers.lm_loss.chunked import summed_cross_entropy
from hf_ctxmodels.layers.pooling import Pooling, pool_rows, token_mask
from hf_ctxmodels.layers.recurrent.lstm import LSTM, PackedRows, State
from hf_ctxmodels.models._shared.configuration_lstm_language_model import CtxLSTMLanguageModelConfig
from hf_ctxmodels.models._shared.recurrent import RecurrentPreTrainedModel, check_states, check_words, rows_of


class LSTMLanguageModelPreTrainedModel(RecurrentPreTrainedModel):
    """The part of the model base that such families share."""

    config: CtxLSTMLanguageModelConfig
    _input_embed_layer = "word_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -self.config.initializer_range, self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)  # `initializer_range` is that of the vectors
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)


@dataclass
class LSTMLanguageModelOutput(BaseModelOutputWithPooling):
    """Output of `LSTMLanguageModel`.

    Attributes:
        last_hidden_state: (batch, length, hidden) of the last layer, before dropout.
        pooler_output: (batch, hidden) one vector of every row, where the family says how (`pooling`); else None.
        hidden_states: Layers + 1 of them, the words' vectors first, of the widths that `config.layer_sizes` lists.
        states: What the LSTM remembers: output and cell, (batch, width) each, of the first layer, of the second, ...
    """

    states: list[Tensor] | None = None


class LSTMLanguageModel(LSTMLanguageModelPreTrainedModel):
    """Words, and LSTMs that read them from left to right. `config.layer_sizes` lists the widths of the layers' inputs,
    and of what the last one gives.

    Attributes:
        pooling: How `pooler_output` is made of the states of a row's words; None for not at all.
    """

    pooling: ClassVar[Pooling | None] = None

    @property
    def reads_backwards(self) -> bool:
        """Whether a text is read from its last word to its first."""
        return False

    def __init__(self, config: CtxLSTMLanguageModelConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.layer_sizes[0])
        self.layers = nn.ModuleList(self.build_layer(*widths) for widths in pairwise(config.layer_sizes))
        self.post_init()

    def build_layer(self, input_size: int, output_size: int) -> LSTM:
        """A layer."""
        return LSTM(input_size, output_size, directions=1, state_bias=True)

    def embed(self, ids: Tensor) -> Tensor:
        """(directions, words) packed ids -> (directions, words, width) their vectors, after dropout."""
        return self.word_embeddings(ids)

    def layer_dropout(self, packed: Tensor, rows: PackedRows, depth: int) -> Tensor:
        """(directions, words, width), the packed input of the layer at `depth` -> the same after dropout."""
        return packed

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
        use_states: bool | None = None,
        truncation: int | None = None,
        layers: int | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LSTMLanguageModelOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, width of the vectors) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding, which does not enter any state.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero.
            states: What the forward of the text read before gave as `states`; None starts from zero.
            use_states: Whether to give `states`; None for `config.stateful`.
            truncation: Steps through which a gradient goes back; None for all.
            layers: How many of the layers read, of which the last one's output is `last_hidden_state`; None for all.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden).
            output_hidden_states: Give `hidden_states`.
            kwargs: What other families' models read, such as `token_type_ids`.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_words`.
        """
        aligned = {"sequence_ids": sequence_ids, "output_mask": output_mask}
        width = self.config.layer_sizes[0]
        given = check_words(self, input_ids, inputs_embeds, attention_mask, width, **aligned)
        if sequence_ids is not None:
            if states is not None:
                raise CtxError("states go on from row to row, but sequence_ids say that a row is several sequences.")
            use_states = False
        rows = rows_of(self.config, given, attention_mask, sequence_ids, directions=2 if self.reads_backwards else 1)
        rows = rows.backwards() if self.reads_backwards else rows
        packed = rows.pack(given) if input_ids is None else self.embed(rows.pack(given))
        outputs, carried = self._run(packed, rows, states, truncation, layers)
        last = rows.unpack(outputs[-1])[0]
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_states = self.config.stateful if use_states is None else use_states
        pooled = None
        if self.pooling is not None:
            pooled = pool_rows(last, token_mask(given, attention_mask, sequence_ids), self.pooling)
        return LSTMLanguageModelOutput(
            last_hidden_state=last if output_mask is None else last[output_mask],
            pooler_output=pooled,
            hidden_states=(*(rows.unpack(each)[0] for each in outputs[:-1]), last) if wants else None,
            states=carried if wants_states else None,
        )

    def _run(
        self,
        packed: Tensor,
        rows: PackedRows,
        states: Sequence[Tensor] | None,
        truncation: int | None,
        layers: int | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The packed output of every layer, that of the embeddings first, and what to carry on."""
        before = self._unstacked(states, rows)
        outputs, after = [packed], []
        for depth, layer in enumerate(self.layers[:layers]):
            packed, state = layer(self.layer_dropout(packed, rows, depth), rows, before[depth], truncation)
            outputs.append(packed)
            after += [each[0] for each in rows.unsorted(state)]
        return outputs, after

    def _unstacked(self, states: Sequence[Tensor] | None, rows: PackedRows) -> list[State | None]:
        """The state of every layer, in the order of the packed rows."""
        if states is None:
            return [None] * len(self.layers)
        expected = [(rows.shape[0], size) for size in self.config.layer_sizes[1:] for _ in State._fields]
        check_states(states, expected)
        parts = [each[None] for each in states]
        return [rows.sorted(State(*pair)) for pair in zip(parts[::2], parts[1::2], strict=True)]


@dataclass
class LSTMForCausalLMOutput(ModelOutput):
    """Output of `LSTMForCausalLM`.

    Attributes:
        loss: Cross-entropy in nats per target, whose exponential is the perplexity; in training with what the family
            adds.
        logits: (batch, length, vocabulary) of the word behind each; None with targets.
        hidden_states, states: See `LSTMLanguageModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    states: list[Tensor] | None = None


class LSTMForCausalLM(heads.HeadModel, GenerationMixin):
    """Each word from those before it; the state may come from the text before, and goes on to the text behind.

    A family's class names `GenerationMixin` among its own bases, where transformers looks for it.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    looks_ahead: ClassVar[bool] = True
    state_outputs: ClassVar[tuple[str, ...]] = ("states",)
    _is_stateful = True  # a state cannot be taken back by some words, which some ways to generate ask for

    def build_head(self, config: CtxLSTMLanguageModelConfig) -> None:
        """The softmax's weights."""
        self.decoder = nn.Linear(config.layer_sizes[-1], config.vocab_size)

    def output_dropout(self, states: Tensor) -> Tensor:
        """(batch, length, hidden), what the softmax reads -> the same after dropout."""
        return states

    def regularization_loss(
        self, raw: Tensor, dropped: Tensor, target_mask: Tensor, neighbours: Tensor
    ) -> Tensor | None:
        """What training adds to the summed cross-entropy.

        Args:
            raw, dropped: (batch, length, hidden) what the last layer gave, before and after dropout.
            asked: (batch, length) bool, the words that have a target.
            neighbours: (batch, length - 1) bool, whether two words next to each other are of one sequence.
        """
        return None

    def get_output_embeddings(self) -> nn.Module:
        """The softmax's weights."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace them (used when the vocabulary is resized)."""
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
        use_states: bool | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        **kwargs: Any,
    ) -> LSTMForCausalLMOutput:
        """The loss where targets are given, else logits. Other arguments as in `LSTMLanguageModel.forward`.

        Args:
            labels: (batch, length) the words themselves, as transformers has them; each is the target of the one
                read before it, and -100 is none. Or (batch, length + 1), with the word behind the row, or before it
                where a text is read backwards, so that the word read last has a target too.

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        targets = target_mask = None
        if labels is not None and given is not None:
            targets = _targets(labels, given.shape[1], attention_mask, sequence_ids, self.base_model.reads_backwards)
            target_mask = targets != heads.IGNORED
        self.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, sequence_ids=sequence_ids, output_mask=target_mask
        )
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            states=states,
            use_states=use_states,
            **kwargs,
        )
        raw = outputs.last_hidden_state
        loss = logits = None
        if targets is None or target_mask is None:
            logits = self.decoder(self.output_dropout(raw))
        else:
            neighbours = _neighbours(token_mask(raw, attention_mask, sequence_ids), sequence_ids)
            loss = self._loss(raw, targets, target_mask, neighbours, num_items_in_batch)
        return LSTMForCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            states=outputs.states,
        )

    def _loss(
        self, raw: Tensor, targets: Tensor, target_mask: Tensor, neighbours: Tensor, counts: heads.ItemCounts
    ) -> Tensor:
        dropped = self.output_dropout(raw)
        loss = heads.vocabulary_loss(
            self._summed_loss, dropped[target_mask], targets, self.decoder.out_features, counts
        )
        if not self.training:
            return loss
        more = self.regularization_loss(raw, dropped, target_mask, neighbours)
        return loss if more is None else loss + heads.mean_over_targets(more, targets, "labels", counts)

    def _summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(self.decoder, states, targets)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The text so far; after the first step its last word, and what the LSTM remembers of the others.

        Raises:
            CtxError: the model reads from right to left.
        """
        if self.base_model.reads_backwards:
            raise CtxError(
                "A model that reads from right to left cannot go on with a text at its end.",
                hint="generate with the model of the other direction.",
            )
        tail = slice(-1 if past_key_values else None, None)
        mask = None if attention_mask is None else attention_mask[:, tail]
        inputs = {"input_ids": input_ids[:, tail], "attention_mask": mask}
        return {**inputs, "states": past_key_values, "use_states": True}

    def _update_model_kwargs_for_generation(
        self, outputs: ModelOutput, model_kwargs: dict[str, Any], *arguments: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *arguments, **kwargs)
        return {**model_kwargs, "past_key_values": outputs.states}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # what it remembers is states, not keys and values

    @staticmethod
    def _reorder_cache(past_key_values: Sequence[Tensor], beam_idx: Tensor) -> list[Tensor]:
        """The states of the beams that go on."""
        return [state.index_select(0, beam_idx.to(state.device)) for state in past_key_values]


def _targets(
    labels: Tensor, length: int, attention_mask: Tensor | None, sequence_ids: Tensor | None, backwards: bool
) -> Tensor:
    """(batch, length): each word's target, the word read next; of (batch, length) labels none at padding and where a
    sequence has been read, which may stand there as words."""
    if backwards:
        mask, sequences = (None if each is None else each.flip(1) for each in (attention_mask, sequence_ids))
        return _targets(labels.flip(1), length, mask, sequences, backwards=False).flip(1)
    if labels.shape[1] == length + 1:
        return labels[:, 1:]
    shifted = F.pad(labels[:, 1:], (0, 1), value=heads.IGNORED)
    if attention_mask is not None:
        shifted = shifted.masked_fill(attention_mask == 0, heads.IGNORED)
    if sequence_ids is not None:
        numbers = sequence_numbers(sequence_ids)
        ends = F.pad(numbers[:, 1:] != numbers[:, :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(ends | (sequence_ids == 0), heads.IGNORED)
    return shifted


def _neighbours(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length - 1) bool: whether two words next to each other are of one sequence."""
    together = tokens[:, 1:] & tokens[:, :-1]
    return together if sequence_ids is None else together & (sequence_ids[:, 1:] == sequence_ids[:, :-1])
