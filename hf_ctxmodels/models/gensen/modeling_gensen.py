"""GenSen (Subramanian et al. 2018, arXiv 1804.00079): a sentence encoder pretrained on several tasks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.recurrent import RecurrentPreTrainedModel
from hf_ctxmodels.architectures.recurrent_sentence_encoder import RecurrentSentenceEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers, linear
from hf_ctxmodels.layers.decoder_output import DecoderOutput
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.sentence_decoder import ConditionalDecoder
from hf_ctxmodels.models.gensen.configuration_gensen import CtxGenSenConfig


class CtxGenSenPreTrainedModel(RecurrentPreTrainedModel):
    """GenSen's part of the model base."""

    config: CtxGenSenConfig
    base_model_prefix = "gensen"
    _input_embed_layer = "embeddings"


class CtxGenSenModel(RecurrentSentenceEncoder, CtxGenSenPreTrainedModel):
    """The shared encoder: bidirectional GRUs, whose final states are the sentence vector."""

    def build_layer(self, input_size: int, hidden_size: int) -> GRU:
        """Create a bidirectional GRU."""
        return GRU(input_size, hidden_size)


def comparison(config: CtxGenSenConfig, classes: int) -> nn.Module:
    """A classifier of [u; v; |u - v|; u * v] with one hidden layer."""
    hidden = nn.Linear(4 * config.hidden_size, config.classifier_size)
    return LinearLayers(hidden, nn.ReLU(), nn.Linear(config.classifier_size, classes))


@dataclass
class CtxGenSenEncoded(BaseModelOutputWithPooling):
    """Output of the pretraining head's encoder.

    Attributes:
        pooler_output: (batch, hidden) the decoders' input: the first text's vector, after dropout.
        texts: Both texts' vectors, (batch, hidden) each.
    """

    texts: tuple[Tensor, Tensor] | None = None


@dataclass
class CtxGenSenForPreTrainingOutput(heads.ConditionalGenerationOutput):
    """Output of `CtxGenSenForPreTraining`, see `ConditionalGenerationOutput`.

    Attributes:
        loss: The sum of the terms whose targets are given.
        generation_loss, relation_loss: The terms, each a mean in nats per target, detached; None without targets.
        relation_logits: (batch, relations); None if only generation targets are given.
        metrics: `relation_accuracy`, see `accuracy_counts`.
    """

    generation_loss: Tensor | None = None
    relation_loss: Tensor | None = None
    relation_logits: Tensor | None = None
    metrics: dict[str, Tensor] | None = None


class CtxGenSenForPreTraining(
    heads.SiameseEncoder, heads.ForConditionalGeneration, CtxGenSenPreTrainedModel, GenerationMixin
):
    """All tasks: a decoder for each generation task, and a classifier of text pairs.

    Rows of a batch may belong to several tasks; the paper trains with one task per batch.
    """

    encoder_class = CtxGenSenModel
    pools = True
    has_target_languages = True
    accepts_loss_kwargs = False
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "relation_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("generation_loss", "relation_loss")

    def build_head(self, config: CtxGenSenConfig) -> None:
        """The decoders and the classifier."""
        sizes = (config.target_vocab_size, config.embedding_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.relation_dropout = Dropout(config.head_dropout)
        names = (name.replace(".", "_") for name in config.decoder_tasks or ())
        self.decoders = nn.ModuleDict({name: ConditionalDecoder(*sizes, config.pad_token_id) for name in names})
        self.relation = comparison(config, len(config.relations)) if config.relations else None

    def encode(self, **inputs: Any) -> CtxGenSenEncoded:
        """Run the encoder on both texts."""
        outputs, first, second = self.encode_texts(**inputs)
        return CtxGenSenEncoded(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=self.dropout(first),
            hidden_states=outputs.hidden_states,
            texts=(first, second),
        )

    def start(self, encoded: BaseModelOutputWithPooling) -> RecurrentCache:
        """The sentence vector."""
        return ConditionalDecoder.start(encoded.pooler_output)

    def predict(self, ids: Tensor, given: heads.DecoderInputs) -> tuple[Tensor, DecoderOutput]:
        """See `ForConditionalGeneration.predict`; each row by its own decoder."""
        numbers, unpad = self._decoder_numbers(ids, given.languages), self._selects_rows(ids)
        vectors, cache = given.encoded.pooler_output, given.cache
        found: list[tuple[Tensor, ...]] = []
        positions = []
        for number, decoder in self._numbered():
            rows = (numbers == number).nonzero()[:, 0] if unpad else torch.arange(ids.shape[0], device=ids.device)
            if unpad and not len(rows):
                continue
            part = decoder(ids[rows], vectors[rows], cache.select(rows), unpad=unpad, record=given.record)
            layers = part.hidden_states or ()
            found.append((linear(decoder.prediction, part.states), part.states, *part.cache.states[0], *layers))
            positions.append(rows + (0 if unpad else number * ids.shape[0]))
        order = torch.cat(positions).argsort() if unpad else numbers * ids.shape[0] + positions[0]
        logits, states, hidden, *recorded = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
        after = RecurrentCache([(hidden,)], cache.seen_tokens + ids.shape[1])
        return logits, DecoderOutput(states, after, tuple(recorded) if given.record else None)

    def decoder_loss(self, ids: Tensor, labels: Tensor, given: heads.DecoderInputs, counts: heads.ItemCounts) -> Tensor:
        """See `ForConditionalGeneration.decoder_loss`; each row by its own decoder."""
        numbers, vectors = self._decoder_numbers(ids, given.languages), given.encoded.pooler_output
        target_mask = labels != heads.IGNORE_INDEX
        heads.check_token_labels(labels, self.config.target_vocab_size)
        total = (vectors * 0).sum()  # so that a batch without targets has a loss with a gradient
        for number, decoder in self._numbered():
            rows = numbers == number
            targets = target_mask & rows[:, None]
            if not self._selects_rows(ids):
                states = decoder(ids, vectors, given.cache, unpad=False).states[targets]
                total = total + decoder.summed_loss(states, labels[targets])
            elif bool(targets.any()):
                own = vectors[rows]
                states = decoder.target_states(ids[rows], target_mask[rows], own, decoder.start(own))
                total = total + decoder.summed_loss(states, labels[targets])
        return heads.mean_over_targets(total, labels, "labels", counts)

    def _numbered(self) -> Iterator[tuple[int, ConditionalDecoder]]:
        return enumerate(cast("Iterable[ConditionalDecoder]", self.decoders.values()))

    def _decoder_numbers(self, ids: Tensor, languages: Tensor | None) -> Tensor:
        return ids.new_zeros(ids.shape[0]) if languages is None else languages

    def _selects_rows(self, ids: Tensor) -> bool:
        """Whether a decoder runs on its own rows only; else on all, and other rows' results are dropped."""
        return bool(self.config.unpad) and not is_traced(ids)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        relation_labels: Tensor | None = None,
        target_languages: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxGenSenForPreTrainingOutput:
        """The losses of the given targets, else logits. Other arguments as in `ForConditionalGeneration.forward`.

        Args:
            token_type_ids: (batch, length) 1 at a second text; the decoders' source is the first text.
            relation_labels: (batch,) relation of the two texts, an index in `config.relations`; -100 for none.
            target_languages: (batch,) generation task, an index in `config.decoder_tasks`; None for the first.

        Raises:
            CtxError: As there; or labels of a task that the model lacks.
        """
        labels = None if labels is None else heads.validate_targets(labels, "labels")
        if encoder_outputs is None:
            given = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encode(attention_mask=attention_mask, **given, **kwargs)
        found = CtxGenSenForPreTrainingOutput(encoder_hidden_states=encoder_outputs.hidden_states)
        if not len(self.decoders):
            if heads.has_targets(labels):
                raise CtxError("The model has no decoder: config.decoder_tasks is empty.", hint="leave labels out.")
            target_languages, return_logits = None, False
            kwargs |= {"output_hidden_states": False, "output_attentions": False}
        if labels is not None or decoder_input_ids is not None:
            generated = super().forward(
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                labels=labels,
                target_languages=target_languages,
                encoder_outputs=encoder_outputs,
                past_key_values=past_key_values,
                use_cache=use_cache,
                num_items_in_batch=num_items_in_batch,
                return_logits=return_logits,
                **{**kwargs, "return_dict": True},
            )
            found = CtxGenSenForPreTrainingOutput(**generated)
        if relation_labels is not None:
            self._relate(found, encoder_outputs, relation_labels, num_items_in_batch)
        elif labels is None and self.relation is not None and (texts := getattr(encoder_outputs, "texts", None)):
            found["relation_logits"] = self.relation(self.relation_dropout(heads.pair_features(*texts)))
        if heads.has_targets(labels):
            found["generation_loss"] = generated.loss.detach()
        if found.loss is not None:
            found["loss"] = self.with_unused_parameters(found.loss)
        return found

    def _relate(
        self,
        found: CtxGenSenForPreTrainingOutput,
        encoder_outputs: Any,
        relation_labels: Any,
        counts: heads.ItemCounts,
    ) -> None:
        """Add the relation loss to the output; nothing without a target where the model has no relations."""
        texts = getattr(encoder_outputs, "texts", None)
        targets = heads.validate_sequence_targets(relation_labels, "relation_labels", len(encoder_outputs[0]))
        if self.relation is None and not heads.has_targets(targets):
            return
        if self.relation is None or texts is None:
            raise CtxError(
                "relation_labels are given without config.relations, or with encoder_outputs of one text.",
                hint="set config.relations, and give the texts, not encoder_outputs.",
            )
        logits = self.relation(self.relation_dropout(heads.pair_features(*texts)))
        loss = heads.cross_entropy_over_targets(logits, targets, "relation_labels", counts)
        found["loss"] = loss if found.loss is None else found.loss + loss
        found["relation_loss"] = loss.detach() if heads.has_targets(targets) else None
        found["relation_logits"] = logits
        found["metrics"] = {"relation_accuracy": heads.accuracy_counts(logits.detach(), targets)}


class CtxGenSenForSequenceClassification(heads.ForTextPairClassification, CtxGenSenPreTrainedModel):
    """A classifier of text pairs, or of single texts; see `ForTextPairClassification`."""

    encoder_class = CtxGenSenModel

    def build_pair_classifier(self, config: CtxGenSenConfig) -> nn.Module:
        """The classifier of pretraining."""
        return comparison(config, config.num_labels)
