"""GenSen (Subramanian et al. 2018, arXiv 1804.00079): a sentence encoder pretrained by multi-task learning."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.sentence_encoder import RecurrentSentenceEncoder
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, select_true, to_device
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers, linear
from hf_ctxmodels.layers.pooling import build_token_mask, pair_features, text_masks
from hf_ctxmodels.layers.recurrent.decoders import ConditionalDecoder
from hf_ctxmodels.layers.recurrent.rnn import GRU
from hf_ctxmodels.models.gensen.configuration_gensen import CtxGenSenConfig


class CtxGenSenPreTrainedModel(CtxPreTrainedModel):
    """Base class of the GenSen models."""

    config: CtxGenSenConfig
    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs
    base_model_prefix = "gensen"


class CtxGenSenModel(RecurrentSentenceEncoder, CtxGenSenPreTrainedModel):
    """The shared encoder: bidirectional GRUs, whose final states are the sentence embedding."""

    def build_layer(self, input_size: int, hidden_size: int) -> GRU:
        """Create a bidirectional GRU."""
        return GRU(input_size, hidden_size)


def create_pair_classifier(config: CtxGenSenConfig, classes: int) -> nn.Module:
    """Create a classifier of [u; v; |u - v|; u * v] with one hidden layer."""
    hidden = nn.Linear(4 * config.hidden_size, config.classifier_size)
    return LinearLayers(hidden, nn.ReLU(), nn.Linear(config.classifier_size, classes))


@dataclass
class CtxGenSenEncoderOutput(BaseModelOutputWithPooling):
    """Output of the pretraining head's encoder: (batch, hidden) `text_embeddings`, and as `pooler_output` the decoders'
    input, the first text's embedding after dropout."""

    text_embeddings: tuple[Tensor, Tensor] | None = None


@dataclass
class CtxGenSenForPreTrainingOutput(heads.ConditionalGenerationOutput):
    """Output of `CtxGenSenForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        generation_loss, relation_loss: Cross-entropies in nats per target, detached; None without targets.
        relation_logits: (batch, relations); None with only generation targets.
    """

    generation_loss: Tensor | None = None
    relation_loss: Tensor | None = None
    relation_logits: Tensor | None = None
    metrics: dict[str, Tensor] | None = None


class FirstTextEncoder(nn.Module):
    """Encodes the first text of an example, the source of the decoders."""

    def __init__(self, encoder: CtxGenSenModel) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch; arguments as in the encoder's forward, `token_type_ids` as in `CtxGenSenForPreTraining`."""
        aligned = {"token_type_ids": token_type_ids}
        tokens = self.encoder.check_input_of_any_length(input_ids, inputs_embeds, attention_mask, **aligned)
        if token_type_ids is not None:
            is_second = on_host(lambda types: types != 0, token_type_ids)
            attention_mask = text_masks(build_token_mask(tokens, attention_mask), is_second)[: len(tokens)]
        return self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)


class CtxGenSenForPreTraining(heads.RecurrentForConditionalGeneration, CtxGenSenPreTrainedModel, GenerationMixin):
    """A decoder for each generation task, and a classifier of text pairs.

    A batch may contain examples of several tasks; the paper trains with one task per batch.
    """

    encoder_class = CtxGenSenModel
    uses_pooled_output = True
    has_target_languages = True
    accepts_loss_kwargs = False
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "relation_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("generation_loss", "relation_loss")

    def build_head(self, config: CtxGenSenConfig) -> None:
        """Create the decoders and the classifier."""
        sizes = (config.target_vocab_size, config.embedding_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.relation_dropout = Dropout(config.head_dropout)
        names = (name.replace(".", "_") for name in config.decoder_tasks or ())
        self.decoders: Any = nn.ModuleDict({name: ConditionalDecoder(*sizes, config.pad_token_id) for name in names})
        self.relation = create_pair_classifier(config, len(config.relations)) if config.relations else None

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder of the first text, run once by `generate`."""
        return FirstTextEncoder(self.base_model)

    def encode(self, **inputs: Any) -> CtxGenSenEncoderOutput:
        """Run the encoder on one or two texts."""
        outputs, first, second = heads.encode_text_pair(self, **inputs)
        return CtxGenSenEncoderOutput(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=self.dropout(first),
            hidden_states=outputs.hidden_states,
            text_embeddings=(first, second),
        )

    def start(self, encoder_outputs: BaseModelOutputWithPooling) -> RecurrentCache:
        """The decoder's initial state: the sentence embedding."""
        return ConditionalDecoder.start(encoder_outputs.pooler_output)

    def predict(
        self, decoder_input_ids: Tensor, inputs: heads.RecurrentDecoderInputs
    ) -> tuple[Tensor, RecurrentDecoderOutput]:
        """Run the decoder of each example's task, see `RecurrentForConditionalGeneration.predict`."""
        batch, steps = decoder_input_ids.shape
        tasks = self._tasks(decoder_input_ids, inputs.target_languages)
        selects_examples = self._selects_examples(decoder_input_ids)
        embeddings, cache = inputs.encoder_outputs.pooler_output, inputs.cache
        outputs: list[tuple[Tensor, ...]] = []
        positions = []  # of the outputs in the batch
        for task, decoder in enumerate(self.decoders.values()):
            examples = torch.arange(batch)
            if selects_examples:
                examples = examples[host_copy(tasks) == task]
                if not len(examples):
                    continue
            examples = to_device(examples, decoder_input_ids.device)
            decoded = decoder(
                decoder_input_ids[examples],
                embeddings[examples],
                cache.select(examples),
                unpad=selects_examples,
                record=inputs.is_recording,
            )
            logits = linear(decoder.prediction, decoded.states)
            outputs.append((logits, decoded.states, *decoded.cache.states[0], *(decoded.hidden_states or ())))
            positions.append(examples)
        order = torch.cat(positions).argsort() if selects_examples else tasks * batch + positions[0]
        logits, states, hidden, *layers = (torch.cat(tensors)[order] for tensors in zip(*outputs, strict=True))
        new_cache = RecurrentCache([(hidden,)], cache.seen_tokens + steps)
        return logits, RecurrentDecoderOutput(states, new_cache, tuple(layers) if inputs.is_recording else None)

    def decoder_loss(
        self,
        decoder_input_ids: Tensor,
        labels: Tensor,
        inputs: heads.RecurrentDecoderInputs,
        num_items: heads.ItemCounts,
    ) -> Tensor:
        """Loss of the decoder of each example's task, see `RecurrentForConditionalGeneration.decoder_loss`."""
        embeddings = inputs.encoder_outputs.pooler_output
        tasks = self._tasks(decoder_input_ids, inputs.target_languages)
        selects_examples = self._selects_examples(decoder_input_ids)
        target_mask = heads.mask_of_targets(labels)
        heads.check_classes(labels, self.config.target_vocab_size, "labels", "vocab_size")
        total = (embeddings * 0).sum()  # a batch without targets has a loss with a gradient
        for task, decoder in enumerate(self.decoders.values()):
            is_task = on_host(functools.partial(torch.eq, other=task), tasks)
            targets = on_host(lambda mask, rows: mask & rows[:, None], target_mask, is_task)
            if not selects_examples:
                states = decoder(decoder_input_ids, embeddings, inputs.cache, unpad=False).states
                total = total + decoder.summed_loss(select_true(states, targets), select_true(labels, targets))
            elif bool(host_copy(targets).any()):
                ids, mask = (
                    on_host(lambda tensor, rows: tensor[rows], tensor, is_task)
                    for tensor in (decoder_input_ids, target_mask)
                )
                task_embeddings = select_true(embeddings, is_task)
                states = decoder.target_states(ids, mask, task_embeddings, decoder.start(task_embeddings))
                total = total + decoder.summed_loss(states, select_true(labels, targets))
        return heads.mean_over_targets(total, labels, "labels", num_items)

    def _tasks(self, ids: Tensor, languages: Tensor | None) -> Tensor:
        """(batch,) task of each example, by default the first."""
        return to_device(torch.zeros(len(ids), dtype=torch.long), ids.device) if languages is None else languages

    def _selects_examples(self, ids: Tensor) -> bool:
        """Whether each decoder runs only on its own examples; else it runs on all, and other outputs are discarded."""
        return self.config.unpad and not is_traced(ids)

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
        """Compute the losses with targets, otherwise logits.

        Other arguments as in `RecurrentForConditionalGeneration.forward`.

        Args:
            token_type_ids: (batch, length) 1 in the second text; the decoders' source is the first text.
            relation_labels: (batch,) relations of both texts, indices in `config.relations`; -100 is ignored.
            target_languages: (batch,) generation tasks, indices in `config.decoder_tasks`; None for the first.
        """
        labels = None if labels is None else heads.validate_targets(labels, "labels")
        if encoder_outputs is None:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            encoder_outputs = self.encode(**inputs, inputs_embeds=inputs_embeds, **kwargs)
        output = CtxGenSenForPreTrainingOutput(encoder_hidden_states=encoder_outputs.hidden_states)
        if not len(self.decoders):
            if heads.has_targets(labels):
                raise CtxError("The model has no decoder: config.decoder_tasks is empty.", hint="remove labels.")
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
            output = CtxGenSenForPreTrainingOutput(**generated)
            if heads.has_targets(labels):
                output["generation_loss"] = generated.loss.detach()
        relations = None
        if relation_labels is not None:
            relations = heads.validate_sequence_targets(relation_labels, "relation_labels", len(encoder_outputs[0]))
        embeddings = getattr(encoder_outputs, "text_embeddings", None)
        if self.relation is not None and embeddings is not None and (relations is not None or labels is None):
            logits = self.relation(self.relation_dropout(pair_features(*embeddings)))
            output["relation_logits"] = logits
            if relations is not None:
                loss = heads.cross_entropy_over_targets(logits, relations, "relation_labels", num_items_in_batch)
                output["loss"] = loss if output.loss is None else output.loss + loss
                output["relation_loss"] = heads.detached_loss(loss, relations)
                output["metrics"] = {"relation_accuracy": heads.accuracy_counts(logits.detach(), relations)}
        elif relations is not None and (self.relation is not None or heads.has_targets(relations)):
            raise CtxError(
                "relation_labels require config.relations, and encoder_outputs of both texts.",
                hint="set config.relations, and pass texts instead of encoder_outputs.",
            )
        if output.loss is not None:
            output["loss"] = self.with_unused_parameters(output.loss)
        return output


class CtxGenSenForSequenceClassification(heads.ForTextPairClassification, CtxGenSenPreTrainedModel):
    """A classifier of text pairs, or of single texts; see `ForTextPairClassification`."""

    encoder_class = CtxGenSenModel

    def build_pair_classifier(self, config: CtxGenSenConfig) -> nn.Module:
        """Create the classifier as in pretraining."""
        return create_pair_classifier(config, config.num_labels)
