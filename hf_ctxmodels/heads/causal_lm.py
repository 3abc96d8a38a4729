"""The causal language modelling head."""

from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.inputs import check_aligned, check_tensors, is_traced, sequence_numbers
from hf_ctxmodels.heads.base import (
    IGNORE_INDEX,
    HeadModel,
    ItemCounts,
    language_modeling_loss,
    loss_from_logits,
    validate_targets,
)
from hf_ctxmodels.heads.generation import PrepackingGenerationMixin
from hf_ctxmodels.layers.cpu.linear import linear


class ForCausalLM(HeadModel, PrepackingGenerationMixin):
    """Predicts each token from those before it; `generate` continues a text.

    With `labels`, the encoder's output and the vocabulary logits are computed for the tokens with a target only, and
    `logits` is None, unless `returns_logits`. A family creates the linear map to the logits in `build_head`, names it
    in `output_layer`, and lists `GenerationMixin` among its class's direct bases, as transformers requires.

    Attributes:
        shifts_labels: Whether the head shifts the labels: a token's label is the target of the token before it.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    shifts_labels: ClassVar[bool] = True

    @property
    def is_backward(self) -> bool:
        """Whether the model reads from right to left and predicts each token from those after it."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The loss with `labels`, else logits. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) the tokens themselves, as in transformers, shifted by the head; -100 is ignored. Or
                (batch, length + 1), including the token that follows the row (precedes it, for a backward model), so
                that the last token in reading order has a target too.
            logits_to_keep: As in transformers: how many of the last positions have logits, 0 for all, or a tensor of
                positions. The loss does not depend on it.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder; and `shift_labels` (batch, length), the target of each token, -100 for
                none, in place of `labels`. It is no argument by name, since Trainer takes those for labels of its own.
        """
        check_tensors(attention_mask=attention_mask)
        shape = self.input_shape(input_ids, inputs_embeds)
        targets = self._targets(shape, labels, kwargs.pop("shift_labels", None), attention_mask, sequence_ids)
        everywhere = targets is None or self.returns_logits(return_logits)
        outputs = self.encode_for_targets(
            None if targets is None else targets != IGNORE_INDEX,
            everywhere,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        states = outputs.last_hidden_state
        logits = self._logits(slice_logits_to_keep(states, logits_to_keep)) if everywhere else None
        loss = None
        if targets is not None:
            full = logits if isinstance(logits_to_keep, int) and not logits_to_keep else None
            if everywhere and full is None:
                outputs.last_hidden_state = states[targets != IGNORE_INDEX]
            loss = self.next_token_loss(outputs, targets, num_items_in_batch, full)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.get("attentions"),
        )

    def targets_of(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """(batch, length) the target of each token, -100 for none; None without any. Arguments as in `forward`."""
        shape = self.input_shape(input_ids, None)
        return self._targets(shape, labels, shift_labels, attention_mask, sequence_ids)

    def _targets(
        self,
        shape: tuple[int, int] | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> Tensor | None:
        """(batch, length) from either argument, or None; arguments as in `forward`, `shape` the input's."""
        check_tensors(labels=labels, shift_labels=shift_labels)
        if shape is None:
            return None  # the encoder says what is wrong
        if shift_labels is not None:
            return validate_targets(shift_labels, "shift_labels", shape)
        if labels is None:
            return None
        rows, length = shape
        labels = validate_targets(labels, "labels", shape, (rows, length + 1))
        if not is_traced(labels):
            check_aligned({"attention_mask": attention_mask, "sequence_ids": sequence_ids}, rows, length)
        return next_token_targets(labels, length, attention_mask, sequence_ids, self.is_backward)

    def encode_for_targets(self, target_mask: Tensor | None, everywhere: bool, **inputs: Any) -> Any:
        """Run the encoder.

        Args:
            target_mask: (batch, length) bool, True at tokens with a target; None without labels.
            everywhere: Whether `last_hidden_state` is that of all tokens, (batch, length, hidden), or of those with a
                target, (targets, hidden).
            inputs: Arguments of the encoder.
        """
        return self.encode(output_mask=None if everywhere else target_mask, **inputs)

    def next_token_loss(
        self, outputs: Any, targets: Tensor, counts: ItemCounts, logits: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats per target, the logarithm of the perplexity.

        Args:
            outputs: The encoder's output; without `logits`, with `last_hidden_state` (targets, hidden).
            targets: (batch, length), see `next_token_targets`.
            counts: As in `mean_over_targets`.
            logits: (batch, length, vocabulary), where those of all tokens are there.
        """
        if logits is not None:
            return loss_from_logits(logits, targets, counts)
        states = self.decoder_input(outputs.last_hidden_state)
        return language_modeling_loss(self._decoder, states, targets, counts)

    def _logits(self, states: Tensor) -> Tensor:
        return linear(self._decoder, self.decoder_input(states))

    @property
    def _decoder(self) -> nn.Linear:
        return cast(nn.Linear, self.get_output_embeddings())


def next_token_targets(
    labels: Tensor, length: int, attention_mask: Tensor | None, sequence_ids: Tensor | None, backward: bool = False
) -> Tensor:
    """(batch, length): each token's target, the next token in reading order; -100 for none.

    (batch, length) labels have no target at padding positions and at the end of a sequence; (batch, length + 1) labels
    are used as they are.
    """
    if backward:
        mask, sequences = (None if each is None else each.flip(1) for each in (attention_mask, sequence_ids))
        return next_token_targets(labels.flip(1), length, mask, sequences).flip(1)
    if labels.shape[1] == length + 1:
        return labels[:, 1:]
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if attention_mask is not None:
        shifted = shifted.masked_fill(attention_mask == 0, IGNORE_INDEX)
    if sequence_ids is not None:
        numbers = sequence_numbers(sequence_ids)
        ends = F.pad(numbers[:, 1:] != numbers[:, :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(ends | (sequence_ids == 0), IGNORE_INDEX)
    return shifted
