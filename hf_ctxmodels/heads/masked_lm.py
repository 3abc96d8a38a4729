"""The head for masked language modeling."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.heads.base import HeadModel, ItemCounts, language_modeling_loss, loss_from_logits, select_states
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead


def build_mlm_head(config: Any, embedding_size: int, activation: str | None = None) -> MaskedLMHead:
    """The masked-LM head for word embeddings of this width; `activation` is by default `config.hidden_act`."""
    return MaskedLMHead(
        config.hidden_size,
        embedding_size,
        config.vocab_size,
        activation=activation or config.hidden_act,
        layer_norm_eps=config.layer_norm_eps,
    )


def masked_lm_loss(
    head: MaskedLMHead,
    states: Tensor,
    labels: Tensor | None,
    num_items: ItemCounts,
    name: str = "labels",
    *,
    logits: Tensor | None = None,
    output_mask: Tensor | None = None,
) -> Tensor | None:
    """Mean cross-entropy in nats of the masked tokens; None without labels.

    Args:
        states: (targets, hidden) the encoder's output where `labels` is not -100.
        labels: (batch, length) token ids.
        num_items, name: As in `number_of_targets`.
        logits: (batch, length, vocabulary), if all of them have been computed.
        output_mask: (batch, length) bool, the positions of the states if they are not exactly the labeled positions.
    """
    if labels is None:
        return None
    if logits is not None:
        return loss_from_logits(logits, labels, num_items, name)
    if output_mask is not None:
        states = select_states(states, labels, output_mask)
    return language_modeling_loss(head.decoder, states, labels, num_items, name, summed_loss=head.summed_loss)


def is_masked_lm(model: Any) -> bool:
    """Whether a model predicts masked tokens, possibly in addition to other pretraining tasks."""
    return isinstance(model, ForMaskedLM) or isinstance(getattr(model, "mlm_head", None), MaskedLMHead)


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary's logits are computed at the labeled positions only, and `logits`
    is None, unless `needs_all_logits`.

    Attributes:
        transform_activation: Activation of the head's dense layer; None for `config.hidden_act`.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    transform_activation: ClassVar[str | None] = None
    output_layer_name = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """Create the masked-LM head, whose decoder has the width of the word embeddings."""
        embedding_size = self.get_input_embeddings().embedding_dim
        self.mlm_head = build_mlm_head(config, embedding_size, self.transform_activation)

    def token_logits(self, states: Tensor) -> Tensor:
        """(..., hidden) output of the encoder -> (..., vocabulary) logits."""
        return self.mlm_head(states)

    def token_loss(self, states: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats; (targets, hidden) states at the labeled positions."""
        head = self.mlm_head
        return language_modeling_loss(head.decoder, states, labels, num_items, summed_loss=head.summed_loss)

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
        return_logits: bool | None = None,
        langs: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute logits, or the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        output_mask = self.target_output_mask(return_logits, labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            **self.extra_ids(langs=langs, task_type_ids=task_type_ids),
            **kwargs,
        )
        states = outputs.last_hidden_state
        logits = self.token_logits(states) if output_mask is None else None
        loss = None
        if labels is not None and logits is not None:
            loss = loss_from_logits(logits, labels, num_items_in_batch)
        elif labels is not None:
            loss = self.token_loss(states, labels, num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
