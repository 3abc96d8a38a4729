"""The head for masked language modelling."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.heads.base import IGNORE_INDEX, HeadModel, ItemCounts, language_modeling_loss, loss_from_logits
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary logits are computed at the labelled positions only, and `logits` is
    None, unless `returns_logits`.

    Attributes:
        transform_activation: Activation of the head's dense layer; None for `config.hidden_act`.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    transform_activation: ClassVar[str | None] = None
    output_layer = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """The masked-LM head; its decoder has the width of the word embeddings."""
        self.mlm_head = MaskedLMHead(
            config.hidden_size,
            self.get_input_embeddings().embedding_dim,
            config.vocab_size,
            activation=self.transform_activation or config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
        )

    def masked_lm(
        self, states: Tensor, labels: Tensor | None, counts: ItemCounts, everywhere: bool, name: str = "labels"
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mean cross-entropy in nats at the labelled positions, and the logits; None for what is not there.

        Args:
            states: The encoder's output: (batch, length, hidden) where logits are to be returned, else (targets,
                hidden) at the positions where `labels` is not -100.
            labels: (batch, length), or None.
            counts: As in `mean_over_targets`.
            everywhere: Whether to return logits.
            name: The argument of `forward` that `labels` are.
        """
        head = self.mlm_head
        if everywhere:
            logits = head(states)
            return None if labels is None else loss_from_logits(logits, labels, counts, name), logits
        assert labels is not None
        loss = language_modeling_loss(head.decoder, states, labels, counts, name, summed_loss=head.summed_loss)
        return loss, None

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
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits, or the loss with `labels` (batch, length); -100 is ignored. For `return_logits` see
        `returns_logits`."""
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        everywhere = labels is None or self.returns_logits(return_logits)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=None if everywhere else labels != IGNORE_INDEX,
            **kwargs,
        )
        loss, logits = self.masked_lm(outputs.last_hidden_state, labels, num_items_in_batch, everywhere)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
