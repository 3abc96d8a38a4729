"""ELMo (Peters et al. 2018, arXiv 1802.05365): all layers of a language model of both directions, over characters.

Its own here: what the layers are, which of them a task reads, and what the language model predicts. The arithmetic is
in `hf_ctxmodels.layers.characters`, `recurrent` and `scalar_mix`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.lm_loss.chunked import summed_cross_entropy
from hf_ctxmodels.layers.lm_loss.sampled import sampled_cross_entropy
from hf_ctxmodels.layers.pooling import RowPooler, token_mask
from hf_ctxmodels.layers.recurrent.lstm import PackedRows, State
from hf_ctxmodels.layers.scalar_mix import ScalarMix
from hf_ctxmodels.models._shared.character import CharacterModel, CharacterPreTrainedModel, fixed_vectors
from hf_ctxmodels.models._shared.character_vectors import CharacterVectors
from hf_ctxmodels.models._shared.recurrent import check_states, rows_of, side_by_side
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig


class CtxElmoPreTrainedModel(CharacterPreTrainedModel):
    """ELMo's part of the model base."""

    config: CtxElmoConfig
    base_model_prefix = "elmo"


@dataclass
class CtxElmoModelOutput(BaseModelOutputWithPooling):
    """Output of `CtxElmoModel`.

    Attributes:
        last_hidden_state: (batch, words, hidden), forward and backward states of the top layer behind each other.
        pooler_output: None.
        hidden_states: Layers + 1 of them; the first is the token layer, twice.
        states: What the LSTM remembers: [(batch, layers, 2, hidden / 2) outputs, (batch, layers, 2, cell) cells].
    """

    states: list[Tensor] | None = None


class CtxElmoModel(CharacterModel, CtxElmoPreTrainedModel):
    """Characters, and an LSTM of each direction.

    A row is read as it is: the words that mark beginning and end of a sentence are in `input_ids`.
    """

    def __init__(self, config: CtxElmoConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.build_encoder(config, config.projection_size, config.projection_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

    def look_up(self, input_ids: Tensor) -> Tensor:
        """(batch, words, characters) ids -> (batch, words, hidden / 2): the token layer, which sees no other word."""
        return self.read_characters(input_ids)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
        use_states: bool | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CtxElmoModelOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, words, characters) ids, as the tokenizer makes them; or `inputs_embeds` (batch, words,
                hidden / 2), which stand for the token layer, in their place.
            attention_mask: (batch, words), 1 at words and 0 at padding, which does not enter any state.
            sequence_ids: (batch, words), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero.
            states: What the forward of the text before gave as `states`; None starts from zero.
            use_states: Whether to give `states`; None for `config.stateful`.
            wanted: (batch, words) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden).
            output_hidden_states: Give `hidden_states`.
            kwargs: What other families' models read, such as `token_type_ids`.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        given = self.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, sequence_ids=sequence_ids, output_mask=output_mask
        )
        self.check_characters(input_ids, inputs_embeds, attention_mask, self.config.projection_size)
        rows = rows_of(self.config, given, attention_mask, sequence_ids, 2)
        if sequence_ids is not None:
            if states is not None:
                raise CtxError("states go on from row to row, but sequence_ids say that a row is several sequences.")
            use_states = False
        if input_ids is None:
            packed = rows.pack(given)
        elif rows.present is not None:
            packed = rows.pack(self.look_up(input_ids))
        else:  # the characters of both directions' words at once
            packed = rows.turned(self.characters(input_ids.flatten(0, 1)[rows.places[0]]))
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        layers, carried = self._run(packed, rows, states)
        recorded = None
        if wants:
            recorded = tuple(side_by_side(rows.unpack(layer)) for layer in layers)
        last = recorded[-1] if recorded is not None else side_by_side(rows.unpack(layers[-1]))
        wants_states = self.config.stateful if use_states is None else use_states
        return CtxElmoModelOutput(
            last_hidden_state=last if output_mask is None else last[output_mask],
            hidden_states=recorded,
            states=carried if wants_states else None,
        )

    def _run(
        self, packed: Tensor, rows: PackedRows, states: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The packed output of every layer, that of the characters first, and what to carry on."""
        before = self._unstacked(states, rows)
        outputs, after = [packed], []
        for depth, layer in enumerate(self.layers):
            out, state = layer(self.dropout(packed), rows, before[depth])
            packed = out + packed if depth and self.config.residual else out
            outputs.append(packed)
            after.append(rows.unsorted(state))
        carried = [torch.stack(parts).permute(2, 0, 1, 3) for parts in zip(*after, strict=True)]
        return outputs, carried

    def _unstacked(self, states: Sequence[Tensor] | None, rows: PackedRows) -> list[State | None]:
        """The state of every layer, in the order of the packed rows."""
        config = self.config
        if states is None:
            return [None] * config.num_hidden_layers
        number = rows.shape[0]
        expected = [
            (number, config.num_hidden_layers, 2, width) for width in (config.projection_size, config.cell_size)
        ]
        check_states(states, expected)
        hidden, cell = (each.permute(1, 2, 0, 3) for each in states)
        return [rows.sorted(State(*parts)) for parts in zip(hidden, cell, strict=True)]


class CtxElmoHeadModel(heads.HeadModel, CtxElmoPreTrainedModel):
    """Binds the generic heads to mixes of the encoder's layers, with fixed word vectors beside them (section 3.3)."""

    encoder_class = CtxElmoModel
    mixes_layers: ClassVar[bool] = True
    vectors: CharacterVectors

    def build_encoder(self, config: CtxElmoConfig) -> CtxElmoModel:
        """The encoder; what mixes and pools stands beside it."""
        if self.mixes_layers:
            layers = config.num_hidden_layers + 1
            self.mixes: Any = nn.ModuleList(ScalarMix(layers, config.mix_layer_norm) for _ in range(config.num_mixes))
            if (vectors := fixed_vectors(config)) is not None:
                self.vectors = vectors
        if self.pools:
            self.pooler = RowPooler(config.pooling)
        return CtxElmoModel(config)

    def penalty(self) -> Tensor | None:
        """What draws the mixes towards the average."""
        if not self.mixes_layers or not self.config.mix_decay:
            return None
        return self.config.mix_decay * torch.stack([mix.distance() for mix in self.mixes]).sum()

    def encode(self, *, attention_mask: Tensor | None = None, sequence_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder; `last_hidden_state` is what the mixes make of all layers, with the words' fixed vectors
        behind it where there are any, and `pooler_output` its pooled."""
        if not self.mixes_layers:
            return super().encode(attention_mask=attention_mask, sequence_ids=sequence_ids, **kwargs)
        wants = kwargs.pop("output_hidden_states", None)
        kwargs |= {"attention_mask": attention_mask, "sequence_ids": sequence_ids, "output_hidden_states": True}
        outputs = super().encode(**kwargs)
        states = outputs.hidden_states
        tokens = token_mask(states[0], attention_mask, sequence_ids)
        parts = [mix(states, tokens) for mix in self.mixes]
        if self.config.static_size:
            parts.append(self._fixed(kwargs.get("input_ids")).to(parts[0].dtype))
        mixed = torch.cat(parts, -1)
        outputs.last_hidden_state = mixed
        if self.pools:
            outputs.pooler_output = self.pooler(mixed, tokens)
        if not (self.config.output_hidden_states if wants is None else wants):
            outputs.hidden_states = None
        return outputs

    def _fixed(self, input_ids: Tensor | None) -> Tensor:
        if input_ids is None:
            raise CtxError(
                "inputs_embeds have no characters, by which this head finds the words' fixed vectors.",
                hint="give input_ids, or use a head without pretrained_embeddings.",
            )
        return self.vectors(input_ids)


@dataclass
class CtxElmoForPreTrainingOutput(ModelOutput):
    """Output of `CtxElmoForPreTraining`.

    Attributes:
        loss: Cross-entropy in nats per target, of both directions; its exponential is the perplexity.
        logits: (batch, words, 2, vocabulary) of the word behind each and of the word before it; None with `labels`.
        hidden_states, states: See `CtxElmoModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    states: list[Tensor] | None = None


class CtxElmoForPreTraining(CtxElmoHeadModel):
    """The language model: each word from those before it, and from those behind it (section 3.1).

    Characters and softmax are those of both directions; the LSTMs are not.
    """

    mixes_layers = False
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    label_axes: ClassVar[tuple[str, ...]] = ("directions",)
    state_outputs: ClassVar[tuple[str, ...]] = ("states",)

    def build_head(self, config: CtxElmoConfig) -> None:
        """Dropout and the softmax's weights."""
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.decoder = nn.Linear(config.projection_size, config.vocab_size)

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
        states: Sequence[Tensor] | None = None,
        use_states: bool | None = None,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        **kwargs: Any,
    ) -> CtxElmoForPreTrainingOutput:
        """The loss where `labels` are given, else logits. Other arguments as in `CtxElmoModel.forward`.

        Args:
            labels: (batch, words, 2) vocabulary ids of the word behind each word and of the word before it; -100 where
                none is to be predicted.
            negatives: (batch, k) vocabulary ids drawn as `layers.sampled_softmax` says; given, in training, they stand
                for the vocabulary, all rows' for every row.

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        target_mask = None if labels is None else self._asked(labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            states=states,
            use_states=use_states,
            output_mask=None if target_mask is None else target_mask.any(-1),
            **kwargs,
        )
        top = self.dropout(outputs.last_hidden_state).unflatten(-1, (2, self.config.projection_size))
        if labels is None or target_mask is None:
            loss, logits = None, self.decoder(top)
        else:
            loss = heads.vocabulary_loss(
                partial(self._summed_loss, negatives=negatives if self.training else None),
                top[target_mask[target_mask.any(-1)]],
                labels,
                self.decoder.out_features,
                num_items_in_batch,
            )
            logits = None
        return CtxElmoForPreTrainingOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, states=outputs.states
        )

    def _asked(self, labels: Tensor) -> Tensor:
        if labels.dim() != 3 or labels.shape[2] != 2:
            raise CtxError(f"labels must be (batch, words, 2); got {tuple(labels.shape)}.")
        return labels != heads.IGNORED

    def _summed_loss(self, states: Tensor, targets: Tensor, negatives: Tensor | None) -> Tensor:
        if negatives is None:
            return summed_cross_entropy(self.decoder, states, targets)
        check_ids("negatives", negatives, self.decoder.out_features, "vocab_size")
        return sampled_cross_entropy(states, self.decoder.weight, self.decoder.bias, targets, negatives.flatten())


class CtxElmoForSequenceClassification(heads.ForSequenceClassification, CtxElmoHeadModel):
    """ELMo with a classifier or regressor on a row's pooled mix of layers."""


class CtxElmoForTokenClassification(heads.ForTokenClassification, CtxElmoHeadModel):
    """ELMo with a linear classifier on each word's mix of layers."""
