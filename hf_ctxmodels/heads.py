"""The downstream heads, written once; a family binds each to its encoder in two lines.

Every head divides the sum of its loss by the number of its targets. `num_items_in_batch` replaces that number by the
count over a larger batch (accumulated micro-batches, other processes), so that accumulation is exact: a number for
heads with one term (what Trainer passes), a mapping from target name to number for all heads.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.modeling_base import CtxPreTrainedModel

IGNORED = -100
if TYPE_CHECKING:
    _Mixin = CtxPreTrainedModel
else:  # derived from PreTrainedModel themselves, the heads would settle `config_class` before the family can
    _Mixin = object
ItemCounts = int | Tensor | Mapping[str, int | Tensor] | None


def mean_over_targets(total: Tensor, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
    """Divide a term's summed loss by its number of targets.

    Args:
        total: The sum over this batch.
        targets: This batch's targets; those equal to -100 do not count.
        name: The `forward` argument they came in as.
        counts: Their number over a larger batch, see the module's docstring; None counts `targets`.
    """
    count = counts.get(name) if isinstance(counts, Mapping) else counts
    if count is None:
        count = (targets != IGNORED).sum().clamp(min=1) if not targets.is_floating_point() else targets.numel()
    return total / count


def cross_entropy_over_targets(logits: Tensor, targets: Tensor, name: str, counts: ItemCounts = None) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not -100.

    Args:
        logits: (..., classes).
        targets: (...) class ids.
        name, counts: As in `mean_over_targets`.

    Raises:
        CtxError: A target outside [0, classes).
    """
    classes = logits.shape[-1]
    if not torch.compiler.is_compiling():
        bad = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
        if bad.numel():
            raise CtxError(
                f"{name} holds {int(bad[0])}, outside [0, {classes}) and not -100 (ignored). "
                f"Set config.num_labels (now {classes}) to the number of classes, or mend the labels."
            )
    total = F.cross_entropy(
        logits.reshape(-1, classes).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return mean_over_targets(total, targets, name, counts)


def right_guesses(logits: Tensor, targets: Tensor) -> Tensor:
    """(2,): how many targets have the largest logit, and how many targets there are: an accuracy, as outputs hold it.

    A pretraining head reports what it counts in its output field `metrics`, name -> (numerator, denominator), both
    summed over the batch; the training loop adds them up and logs the ratio.

    Args:
        logits: (..., classes).
        targets: (...) class ids; -100 is ignored.
    """
    counted = targets != IGNORED
    return torch.stack([((logits.argmax(-1) == targets) & counted).sum(), counted.sum()]).float()


class HeadModel(_Mixin):
    """A head on a family's encoder, which it holds under the family's `base_model_prefix`.

    Attributes:
        encoder_class: The family's base model.
        pools: Whether the head reads `pooler_output`.
        accepts_loss_kwargs: Whether Trainer may pass one `num_items_in_batch`: exact for heads with one term only.
    """

    encoder_class: ClassVar[type[CtxPreTrainedModel]]
    pools: ClassVar[bool] = False
    accepts_loss_kwargs = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.encoder_class(config, add_pooling_layer=self.pools))
        self.build_head(config)
        self.post_init()

    def build_head(self, config: Any) -> None:
        """Create the head's own modules."""
        raise NotImplementedError

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; always returns a model output."""
        return self.base_model(return_dict=True, **kwargs)


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary logits are computed at the labelled positions alone, and `logits`
    is None; without labels, `logits` is full.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def get_output_embeddings(self) -> nn.Module:
        """The decoder, tied to the word embeddings unless `config.tie_word_embeddings` is False."""
        return self.mlm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the decoder (used when the vocabulary is resized)."""
        self.mlm_head.decoder = new_embeddings

    def masked_lm_loss(self, states: Tensor, labels: Tensor, counts: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats at the labelled positions.

        Args:
            states: (targets, hidden) the encoder's output at the positions where `labels` is not -100.
            labels: (batch, length).
            counts: As in `mean_over_targets`.
        """
        targets = labels[labels != IGNORED]
        if not torch.compiler.is_compiling():
            bad = targets[(targets < 0) | (targets >= self.config.vocab_size)]
            if bad.numel():
                raise CtxError(f"labels holds {int(bad[0])}, outside [0, vocab_size={self.config.vocab_size}).")
        return mean_over_targets(self.mlm_head.summed_loss(states, targets), labels, "labels", counts)

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
            wanted=None if labels is None else labels != IGNORED,
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


class ForSequenceClassification(HeadModel):
    """Classes or a number for a whole sequence, from the pooled output (Devlin et al. 2019, section 4.1).

    `config.problem_type` may be "regression", "single_label_classification" or "multi_label_classification"; unset, it
    follows from `num_labels` and the type of `labels`, as in transformers.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    pools = True

    def build_head(self, config: Any) -> None:
        """Dropout and a linear map from the pooled output."""
        self.dropout = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (batch, num_labels), and the loss where `labels` are given: (batch,) class ids or numbers, or
        (batch, num_labels) of 0.0 and 1.0 for several labels at once."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _loss(self, logits: Tensor, labels: Tensor, counts: ItemCounts) -> Tensor:
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.is_floating_point():
                self.config.problem_type = "multi_label_classification"
            else:
                self.config.problem_type = "single_label_classification"
        if self.config.problem_type == "single_label_classification":
            return cross_entropy_over_targets(logits, labels.view(-1), "labels", counts)
        labels = labels.to(torch.float32).view(logits.shape)
        error = F.mse_loss if self.config.problem_type == "regression" else F.binary_cross_entropy_with_logits
        return mean_over_targets(error(logits.float(), labels, reduction="sum"), labels, "labels", counts)


class ForTokenClassification(HeadModel):
    """One class per token (Devlin et al. 2019, section 5.3)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: Any) -> None:
        """Dropout and a linear map from every token's state."""
        self.dropout = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits (batch, length, num_labels), and the loss where `labels` (batch, length; -100 ignored) are given."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else cross_entropy_over_targets(logits, labels, "labels", num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ForQuestionAnswering(HeadModel):
    """Start and end of an answer span (Devlin et al. 2019, section 4.2)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    accepts_loss_kwargs = False

    def build_head(self, config: Any) -> None:
        """A linear map from every token's state to a start and an end score."""
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Start and end logits (batch, length), and the mean of the two losses where both positions (batch,) are given;
        positions outside the sequence are ignored, as in transformers. Unlike there, padding is no candidate: the loss
        does not depend on how far a batch is padded."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = (part.contiguous() for part in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            padding = attention_mask == 0 if attention_mask is not None and attention_mask.dim() == 2 else None
            start = self._loss(start_logits, start_positions, padding, "start_positions", num_items_in_batch)
            end = self._loss(end_logits, end_positions, padding, "end_positions", num_items_in_batch)
            loss = (start + end) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def _loss(scores: Tensor, positions: Tensor, padding: Tensor | None, name: str, counts: ItemCounts) -> Tensor:
        positions = positions.view(-1)
        positions = positions.masked_fill((positions < 0) | (positions >= scores.shape[-1]), IGNORED)
        if padding is not None:
            at_padding = padding.gather(1, positions.clamp(min=0)[:, None])[:, 0] & (positions != IGNORED)
            if not torch.compiler.is_compiling() and bool(at_padding.any()):
                row = int(at_padding.nonzero()[0])
                raise CtxError(f"{name}[{row}] is {int(positions[row])}, where attention_mask is 0 (padding).")
            scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
        return cross_entropy_over_targets(scores, positions, name, counts)


class ForMultipleChoice(HeadModel):
    """One of several continuations, each encoded with the context (Devlin et al. 2019, section 4.4)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    pools = True

    def build_head(self, config: Any) -> None:
        """Dropout and a linear map from the pooled output to one score."""
        self.dropout = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.hidden_size, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Logits (batch, choices) from inputs (batch, choices, length), and the loss where `labels` (batch,) are
        given."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() != (3 if input_ids is not None else 4):
            raise CtxError(
                "Multiple choice takes input_ids (batch, choices, length) or inputs_embeds (batch, choices, length, "
                f"hidden); got {None if given is None else tuple(given.shape)}."
            )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        inputs = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in inputs.items()}
        outputs = self.encode(**inputs, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(given.shape[:2])
        loss = None
        if labels is not None:
            loss = cross_entropy_over_targets(logits, labels.view(-1), "labels", num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
