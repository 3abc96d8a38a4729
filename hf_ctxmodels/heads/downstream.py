"""Heads for downstream tasks: sequences, tokens, spans, choices (Devlin et al. 2019, sections 4 and 5.3)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_tensors
from hf_ctxmodels.heads.answer_network import AnswerNetwork
from hf_ctxmodels.heads.base import (
    IGNORE_INDEX,
    HeadModel,
    ItemCounts,
    check_target_shape,
    cross_entropy_over_targets,
    mean_over_targets,
    validate_sequence_targets,
)
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.lm_loss.cross_entropy import ProjectedHead
from hf_ctxmodels.layers.pooling import Pooling, pool_tokens, token_mask


class SequenceHead(HeadModel):
    """A head on a sequence's vector: the encoder's `pooler_output`, or a pooling by `config.classifier_pooling`."""

    pools = True

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of the tokens' states; None for the encoder's `pooler_output`."""
        return getattr(self.config, "classifier_pooling", None)

    def encode(self, *, attention_mask: Tensor | None = None, sequence_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder; `pooler_output` is the head's input."""
        if sequence_ids is not None:
            kwargs["sequence_ids"] = sequence_ids
        outputs = super().encode(attention_mask=attention_mask, **kwargs)
        if self.pooling is not None:
            if attention_mask is not None and attention_mask.dim() != 2:
                raise CtxError(
                    f"Pooling needs an attention_mask (batch, length); got {tuple(attention_mask.shape)}.",
                    hint="give one, or use classifier_pooling=None.",
                )
            tokens = token_mask(outputs.last_hidden_state, attention_mask, sequence_ids)
            outputs.pooler_output = pool_tokens(outputs.last_hidden_state, tokens, self.pooling)
        return outputs

    def reference_config(self) -> dict[str, Any]:
        """The reference class's configuration; raises CtxError if its head has no such pooling."""
        for name, nothing in (("classifier_pooling", None), ("answer_steps", 0)):
            if getattr(self.config, name, nothing) != nothing:
                raise CtxError(
                    f"transformers' peer of {type(self).__name__} does not support {name}.",
                    hint=f"use save_pretrained, or fine-tune with {name}={nothing}.",
                )
        return super().reference_config()


class ForSequenceClassification(SequenceHead):
    """A classifier or regressor on a sequence's vector (Devlin et al. 2019, section 4.1).

    `config.problem_type` may be "regression", "single_label_classification" or "multi_label_classification"; None
    chooses by `problem_type_of` at each call. Unlike transformers, the head does not change the configuration.

    With `config.answer_steps` the classifier is an `AnswerNetwork` on the states of a pair's tokens.

    Attributes:
        classifier_activation: Activation of a dense layer before the classifier; None for a linear classifier.
        accepts_both_orders: Whether inputs may be (batch, orders, length), a pair in both its orders.
    """

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    classifier_activation: ClassVar[str | None] = None
    accepts_both_orders: ClassVar[bool] = False

    def build_head(self, config: Any) -> None:
        """Dropout and the classifier; a family may replace either."""
        size, labels, rate = config.pooler_size, config.num_labels, config.head_dropout
        self.dropout: nn.Module = Dropout(rate)
        self.classifier: nn.Module
        if getattr(config, "answer_steps", 0):
            self.classifier = AnswerNetwork.of(config)
        elif self.classifier_activation is None:
            self.classifier = nn.Linear(size, labels)
        else:
            self.classifier = ProjectedHead(size, labels, activation=self.classifier_activation, dropout=rate)

    @property
    def uses_pooler(self) -> bool:
        """See `HeadModel.uses_pooler`."""
        return super().uses_pooler and not getattr(self.config, "answer_steps", 0)

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
        """Logits (batch, num_labels), and the loss with `labels`: (batch,) class ids or numbers, or (batch, num_labels)
        of 0.0 and 1.0 for multi-label classification."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        if isinstance(self.classifier, AnswerNetwork):
            logits = self.classifier(outputs.last_hidden_state, attention_mask, token_type_ids)
        else:
            logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None
        if labels is not None:
            loss = sequence_loss(self.config, logits, labels, num_items_in_batch)
            loss = self.add_regularization(loss, outputs, labels, "labels", num_items_in_batch)
        return self.build_output(SequenceClassifierOutput, outputs, loss=loss, logits=logits)


def problem_type_of(config: Any, labels: Tensor | None) -> str:
    """`config.problem_type`; if None, by transformers' rule: regression with one class, multi-label classification with
    floating-point labels."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    several = labels is not None and labels.is_floating_point()
    return "multi_label_classification" if several else "single_label_classification"


def sequence_loss(config: Any, logits: Tensor, labels: Tensor, counts: ItemCounts) -> Tensor:
    """Mean squared error, cross-entropy or binary cross-entropy of (batch, num_labels) logits, by `problem_type_of`."""
    check_tensors(labels=labels)
    problem_type, (rows, classes) = problem_type_of(config, labels), logits.shape
    if problem_type == "single_label_classification":
        return cross_entropy_over_targets(logits, validate_sequence_targets(labels, "labels", rows), "labels", counts)
    check_target_shape(labels, "labels", *([(rows,)] if classes == 1 else []), (rows, classes))
    labels = labels.to(torch.float32).view(logits.shape)
    error = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    return mean_over_targets(error(logits.float(), labels, reduction="sum"), labels, "labels", counts)


class ForTokenClassification(HeadModel):
    """A classifier of each token (Devlin et al. 2019, section 5.3)."""

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: Any) -> None:
        """Dropout and a linear classifier."""
        self.dropout: nn.Module = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.head_input_size, config.num_labels)

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
        """Logits (batch, length, num_labels), and the loss with `labels` (batch, length); -100 is ignored."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = cross_entropy_over_targets(logits, labels, "labels", num_items_in_batch)
            loss = self.add_regularization(loss, outputs, labels, "labels", num_items_in_batch)
        return self.build_output(TokenClassifierOutput, outputs, loss=loss, logits=logits)


class ForQuestionAnswering(HeadModel):
    """Start and end logits of an answer span (Devlin et al. 2019, section 4.2)."""

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    accepts_loss_kwargs = False

    def build_head(self, config: Any) -> None:
        """A linear map from each token's state to its start and end logits."""
        self.qa_outputs = nn.Linear(config.head_input_size, 2)

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
        """Start and end logits (batch, length), and the mean of the two losses with both positions (batch,); positions
        outside the sequence are ignored, as in transformers. Unlike there, the softmax excludes padding."""
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
            start = position_loss(start_logits, start_positions, padding, "start_positions", num_items_in_batch)
            end = position_loss(end_logits, end_positions, padding, "end_positions", num_items_in_batch)
            loss = (start + end) / 2
        found = {"loss": loss, "start_logits": start_logits, "end_logits": end_logits}
        return self.build_output(QuestionAnsweringModelOutput, outputs, **found)


class ForMultipleChoice(SequenceHead):
    """A logit for each of several choices, each encoded with the context (Devlin et al. 2019, section 4.4)."""

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: Any) -> None:
        """Dropout and a linear map from the pooled output to one logit."""
        self.dropout: nn.Module = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.pooler_size, 1)

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) pooled output -> (batch * choices, 1) logits."""
        return self.classifier(self.dropout(pooled))

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
        choice_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Logits (batch, choices) from inputs (batch, choices, length), and the loss with `labels` (batch,).

        `choice_mask` (batch, choices) is 0 at what fills up rows of fewer choices: its logits are the lowest number.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            **{name: kwargs.pop(name) for name in getattr(self.encoder_class, "extra_input_ids", ()) if name in kwargs},
        }
        check_tensors(**inputs, choice_mask=choice_mask)
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() != (3 if input_ids is not None else 4):
            raise CtxError(
                "Multiple choice takes input_ids (batch, choices, length) or inputs_embeds (batch, choices, length, "
                f"hidden); got {None if given is None else tuple(given.shape)}."
            )
        for name, tensor in inputs.items():
            if tensor is not None and (tensor.dim() < 3 or tensor.shape[:2] != given.shape[:2]):
                raise CtxError(
                    f"{name} is {tuple(tensor.shape)}, expected (batch, choices, ...) as of the input, "
                    f"{tuple(given.shape[:2])}."
                )
        if choice_mask is not None and choice_mask.shape != given.shape[:2]:
            raise CtxError(f"choice_mask is {tuple(choice_mask.shape)}, expected {tuple(given.shape[:2])}.")
        inputs = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in inputs.items()}
        outputs = self.encode(**inputs, **kwargs)
        logits = self.score(outputs.pooler_output, given.shape[1]).view(given.shape[:2])
        if choice_mask is not None:
            logits = logits.masked_fill(choice_mask == 0, torch.finfo(logits.dtype).min)
        loss = None
        if labels is not None:
            targets = validate_sequence_targets(labels, "labels", len(logits))
            loss = cross_entropy_over_targets(logits, targets, "labels", num_items_in_batch)
            loss = self.add_regularization(loss, outputs, targets, "labels", num_items_in_batch)
        return self.build_output(MultipleChoiceModelOutput, outputs, loss=loss, logits=logits)


def position_loss(
    scores: Tensor, positions: Tensor, excluded: Tensor | None, name: str, counts: ItemCounts, *, why: str = "padding"
) -> Tensor:
    """Mean cross-entropy in nats of choosing a position.

    Args:
        scores: (batch, length).
        positions: (batch,); positions outside the sequence are ignored.
        excluded: (batch, length) bool, positions excluded from the softmax, or None.
        name, counts: As in `mean_over_targets`.
        why: The reason of the exclusion, for the error.

    Raises:
        CtxError: A target is excluded.
    """
    positions = validate_sequence_targets(positions, name, len(scores))
    positions = positions.masked_fill((positions < 0) | (positions >= scores.shape[-1]), IGNORE_INDEX)
    if excluded is not None:
        misplaced = excluded.gather(1, positions.clamp(min=0)[:, None])[:, 0] & (positions != IGNORE_INDEX)
        if not torch.compiler.is_compiling() and bool(misplaced.any()):
            row = int(misplaced.nonzero()[0])
            raise CtxError(f"{name}[{row}] is {int(positions[row])}, which is excluded: {why}.")
        scores = scores.masked_fill(excluded, torch.finfo(scores.dtype).min)
    return cross_entropy_over_targets(scores, positions, name, counts)
