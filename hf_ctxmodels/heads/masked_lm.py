"""Heads that predict masked tokens, alone or together with what a pair of segments is to each other."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.heads.base import (
    IGNORED,
    HeadModel,
    ItemCounts,
    accuracy_counts,
    cross_entropy_over_targets,
    vocabulary_loss,
)
from hf_ctxmodels.layers.lm_loss.chunked import MaskedPredictionHead


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary logits are computed at the labelled positions alone, and `logits`
    is None; without labels, `logits` is full.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: Any) -> None:
        """The masked-LM head; its decoder is as wide as the word embeddings."""
        self.mlm_head = MaskedPredictionHead(
            config.hidden_size,
            self.get_input_embeddings().embedding_dim,
            config.vocab_size,
            activation=config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
        )

    def get_output_embeddings(self) -> nn.Module:
        """The decoder, tied to the word embeddings unless `config.tie_word_embeddings` is False."""
        return self.mlm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder (used when the vocabulary is resized)."""
        self.mlm_head.decoder = new_embeddings

    def masked_lm_loss(self, states: Tensor, labels: Tensor, counts: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats at the labelled positions.

        Args:
            states: (targets, hidden) the encoder's output at the positions where `labels` is not -100.
            labels: (batch, length).
            counts: As in `mean_over_targets`.
        """
        return vocabulary_loss(self.mlm_head.summed_loss, states, labels, self.config.vocab_size, counts)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Masked-LM logits, or the loss where `labels` (batch, length; -100 is ignored) are given."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=None if labels is None else labels != IGNORED,
            **kwargs,
        )
        states = outputs.last_hidden_state
        if labels is None:
            loss, logits = None, self.mlm_head(states)
        else:
            loss, logits = self.masked_lm_loss(states, labels, num_items_in_batch), None
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ForMaskedLMWithPair(ForMaskedLM):
    """Predicts masked tokens, and in which of two ways the segments of a pair belong together.

    The loss is the sum of the terms whose targets are given, each a mean over its own targets: Trainer's single
    `num_items_in_batch` cannot describe two terms, so it is not asked for (`accepts_loss_kwargs`).

    A family names its two targets in `loss_targets`, writes a `forward` with these arguments that calls
    `predict_words_and_pair`, and classifies pairs in `classify_pair`.

    Attributes:
        output_class: What `forward` returns. Beside `loss`, `prediction_logits`, `mlm_loss`, `metrics`, `hidden_states`
            and `attentions` it has the pair's logits, and its loss: for the target `name_label` it is `name_loss`.
        pair_logits_name: Its field for the pair's logits.
    """

    pools = True
    accepts_loss_kwargs = False
    output_class: ClassVar[type[ModelOutput]]
    pair_logits_name: ClassVar[str]

    def classify_pair(self, pooled: Tensor) -> Tensor:
        """(batch, hidden) pooled output -> (batch, 2) logits."""
        raise NotImplementedError

    def predict_words_and_pair(
        self, labels: Tensor | None, pair_label: Tensor | None, num_items_in_batch: ItemCounts, **inputs: Any
    ) -> ModelOutput:
        """Logits of both heads, and the loss.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; given, the last layer and the vocabulary
                logits are computed only there, and `prediction_logits` is None.
            pair_label: (batch,) 0 or 1.
            num_items_in_batch: As in `mean_over_targets`.
            inputs: What the encoder takes.
        """
        outputs = self.encode(output_mask=None if labels is None else labels != IGNORED, **inputs)
        pair_logits = self.classify_pair(outputs.pooler_output)
        prediction_logits = mlm_loss = pair_loss = metrics = None
        if labels is None:
            prediction_logits = self.mlm_head(outputs.last_hidden_state)
        else:
            mlm_loss = self.masked_lm_loss(outputs.last_hidden_state, labels, num_items_in_batch)
        pair_target = self.loss_targets[1]
        pair_name = pair_target.removesuffix("_label")
        if pair_label is not None:
            targets = pair_label.view(-1)
            pair_loss = cross_entropy_over_targets(pair_logits, targets, pair_target, num_items_in_batch)
            metrics = {f"{pair_name}_accuracy": accuracy_counts(pair_logits, targets)}
        terms = [term for term in (mlm_loss, pair_loss) if term is not None]
        own_fields = {
            self.pair_logits_name: pair_logits,
            f"{pair_name}_loss": None if pair_loss is None else pair_loss.detach(),
        }
        return self.output_class(
            loss=torch.stack(terms).sum() if terms else None,
            prediction_logits=prediction_logits,
            mlm_loss=None if mlm_loss is None else mlm_loss.detach(),
            metrics=metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **own_fields,
        )
