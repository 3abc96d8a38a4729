"""Heads for downstream tasks: sequences, pairs, tokens, spans, choices (Devlin et al. 2019, sections 4 and 5.3)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host
from hf_ctxmodels.core.inputs import check_tensors, nonzero_in_all, padding_mask_or_none
from hf_ctxmodels.heads.answer_network import AnswerNetwork
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    check_target_shape,
    cross_entropy_over_targets,
    mean_over_targets,
    validate_sequence_targets,
)
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.lm_loss.cross_entropy import ProjectedHead
from hf_ctxmodels.layers.pooling import build_token_mask, pair_features, text_masks

_SequenceOutputClass = type[SequenceClassifierOutput] | type[Seq2SeqSequenceClassifierOutput]
_SpanOutputClass = type[QuestionAnsweringModelOutput] | type[Seq2SeqQuestionAnsweringModelOutput]
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class ForSequenceClassification(HeadModel):
    """A classifier or regressor of sequences (Devlin et al. 2019, section 4.1).

    The classifier reads the encoder's `pooler_output`, or the token states pooled by `config.classifier_pooling`.
    With `config.answer_steps` the classifier is an `AnswerNetwork` on the token states of a pair. If
    `config.problem_type` is None, each call infers it by `infer_problem_type`; unlike transformers, the head does not
    change the configuration.

    Attributes:
        classifier_activation: Activation of a dense layer before the classifier; None for a linear classifier.
        classifier_bias: Whether a linear classifier has a bias.
        accepts_both_orders: Whether inputs may be (batch, orders, length), a pair in both orders.
    """

    uses_pooled_output = True
    has_configurable_pooling = True
    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    classifier_activation: ClassVar[str | None] = None
    classifier_bias: ClassVar[bool] = True
    accepts_both_orders: ClassVar[bool] = False
    output_class: ClassVar[_SequenceOutputClass] = SequenceClassifierOutput

    def build_head(self, config: Any) -> None:
        """Create dropout and the classifier; a family may replace either."""
        self.dropout: nn.Module = Dropout(config.head_dropout)
        self.classifier: nn.Module
        if getattr(config, "answer_steps", 0):
            if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
                raise CtxError(
                    f"An answer network predicts one of several classes, but num_labels={config.num_labels} and "
                    f"problem_type={config.problem_type!r}.",
                    location=f"answer_steps={config.answer_steps}",
                    hint="set answer_steps=0 for other tasks.",
                )
            arguments = (config.head_input_size, config.num_labels, config.answer_steps, config.head_dropout)
            self.classifier = AnswerNetwork(*arguments, prediction_dropout=config.answer_dropout)
        elif self.classifier_activation is None:
            self.classifier = nn.Linear(config.pooler_size, config.num_labels, bias=self.classifier_bias)
        else:
            sizes, activation = (config.pooler_size, config.num_labels), self.classifier_activation
            self.classifier = ProjectedHead(*sizes, activation=activation, dropout=config.head_dropout)

    @property
    def uses_pooler(self) -> bool:
        """Whether the head reads the output of the encoder's pooler; an answer network reads the token states."""
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
        langs: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | Seq2SeqSequenceClassifierOutput:
        """Compute logits (batch, num_labels), and the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            labels: (batch,) class indices or numbers; or (batch, num_labels) of 0.0 and 1.0 for multi-label
                classification, or of numbers for regression.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self.extra_ids(langs=langs, task_type_ids=task_type_ids),
            **kwargs,
        )
        if isinstance(self.classifier, AnswerNetwork):
            token_mask = nonzero_in_all(attention_mask, kwargs.get("sequence_ids"))
            logits = self.classifier(outputs.last_hidden_state, token_mask, token_type_ids)
        else:
            logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None
        if labels is not None:
            loss = sequence_loss(self.config, logits, labels, num_items_in_batch)
            loss = self.add_regularization(loss, outputs, labels, "labels", num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, **self.encoder_fields(outputs))


def infer_problem_type(config: Any, labels: Tensor | None) -> str:
    """Return `config.problem_type`; if it is None, infer it as in transformers: regression with one class, multi-label
    classification with floating-point labels, else single-label classification. Raises CtxError for unknown types."""
    if config.problem_type not in (None, *_PROBLEM_TYPES):
        raise CtxError(
            f"problem_type is {config.problem_type!r}, expected {', '.join(_PROBLEM_TYPES)} or None.",
            hint="correct problem_type in the configuration.",
        )
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    is_multi_label = labels is not None and labels.is_floating_point()
    return "multi_label_classification" if is_multi_label else "single_label_classification"


def sequence_loss(config: Any, logits: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
    """Mean squared error, cross-entropy or binary cross-entropy of (batch, num_labels) logits."""
    check_tensors(labels=labels)
    problem_type, (batch_size, classes) = infer_problem_type(config, labels), logits.shape
    if problem_type == "single_label_classification":
        if classes > 1 and not is_traced(labels) and labels.shape == logits.shape:
            raise CtxError(
                f"labels is {tuple(labels.shape)}, expected {(batch_size,)}: one class for each text.",
                hint="set problem_type='multi_label_classification' for several labels of a text.",
            )
        targets = validate_sequence_targets(labels, "labels", batch_size)
        return cross_entropy_over_targets(logits, targets, "labels", num_items)
    check_target_shape(labels, "labels", *([(batch_size,)] if classes == 1 else []), (batch_size, classes))
    labels = labels.to(torch.float32).view(logits.shape)
    criterion = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    return mean_over_targets(criterion(logits.float(), labels, reduction="sum"), labels, "labels", num_items)


def encode_text_pair(
    head: HeadModel,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, Tensor, Tensor]:
    """Run a head's encoder separately on both texts of each example (Conneau et al. 2017, section 3.1).

    `token_type_ids` is 0 in the first and above 0 in the second text. A single text is used as both. Returns the
    encoder's output, in which a token's state depends only on its text, and the (batch, width) vectors of both texts.
    """
    aligned = {"token_type_ids": token_type_ids, "sequence_ids": sequence_ids}
    inputs = head.check_input_of_any_length(input_ids, inputs_embeds, attention_mask, **aligned)
    arguments = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "sequence_ids": sequence_ids}
    if token_type_ids is None or not (is_traced(inputs) or bool(host_copy(token_type_ids).any())):
        outputs = HeadModel.encode(head, attention_mask=attention_mask, **arguments, **kwargs)
        return outputs, outputs.pooler_output, outputs.pooler_output
    is_second = on_host(lambda types: types != 0, token_type_ids)
    masks = text_masks(build_token_mask(inputs, attention_mask, sequence_ids), is_second)
    stacked_arguments = {
        name: None if tensor is None else on_host(lambda rows: torch.cat([rows, rows]), tensor)
        for name, tensor in arguments.items()
    }
    outputs = HeadModel.encode(head, attention_mask=masks, **stacked_arguments, **kwargs)

    def merge(states: Tensor) -> Tensor:
        first_states, second_states = states.chunk(2)
        return torch.where(masks[: len(inputs), :, None], first_states, second_states)

    first_vectors, second_vectors = outputs.pooler_output.chunk(2)
    outputs.last_hidden_state = merge(outputs.last_hidden_state)
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(merge(states) for states in outputs.hidden_states)
    return outputs, first_vectors, second_vectors


class ForTextPairClassification(ForSequenceClassification):
    """A classifier of text pairs on the features (u, v, |u - v|, u * v) of their vectors u and v; a single text is used
    as both. Without `config.text_pairs`, a linear classifier of a single text's vector."""

    def build_head(self, config: Any) -> None:
        """Create dropout and the classifier."""
        self.dropout = Dropout(config.head_dropout)
        if config.text_pairs:
            self.classifier = self.build_pair_classifier(config)
        else:
            self.classifier = nn.Linear(config.pooler_size, config.num_labels)

    def build_pair_classifier(self, config: Any) -> nn.Module:
        """Create the classifier of (u, v, |u - v|, u * v)."""
        raise NotImplementedError

    def encode(
        self, *, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Run the encoder on both texts; `pooler_output` is the input of the classifier. A second text without
        `config.text_pairs` is a CtxError."""
        if self.config.text_pairs:
            outputs, first, second = encode_text_pair(
                self, attention_mask=attention_mask, token_type_ids=token_type_ids, **inputs
            )
            outputs.pooler_output = pair_features(first, second)
            return outputs
        if token_type_ids is not None and not is_traced(token_type_ids) and bool(host_copy(token_type_ids).any()):
            raise CtxError(
                "There is a second text (token_type_ids is not 0), but text_pairs is false.",
                hint="train with text_pairs=true.",
            )
        return super().encode(attention_mask=attention_mask, **inputs)


class ForTokenClassification(HeadModel):
    """A classifier of each token (Devlin et al. 2019, section 5.3)."""

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    output_class: ClassVar[type[TokenClassifierOutput]] = TokenClassifierOutput

    def build_head(self, config: Any) -> None:
        """Create dropout and a linear classifier."""
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
        langs: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Compute logits (batch, length, num_labels), and the loss with `labels`. Other arguments as in the encoder's
        forward.

        Args:
            labels: (batch, length) class indices; -100 is ignored.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self.extra_ids(langs=langs, task_type_ids=task_type_ids),
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = cross_entropy_over_targets(logits, labels, "labels", num_items_in_batch)
            loss = self.add_regularization(loss, outputs, labels, "labels", num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, **self.encoder_fields(outputs))


class ForQuestionAnswering(HeadModel):
    """Start and end logits of an answer span (Devlin et al. 2019, section 4.2)."""

    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    accepts_loss_kwargs = False
    output_class: ClassVar[_SpanOutputClass] = QuestionAnsweringModelOutput

    def build_head(self, config: Any) -> None:
        """Create a linear layer from each token's state to its start and end logits."""
        self.qa_outputs = nn.Linear(config.head_input_size, 2)

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the reference class, whose number of labels is the number of logits."""
        labels = ("id2label", "label2id")
        return {name: value for name, value in super().reference_config().items() if name not in labels}

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
        langs: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput | Seq2SeqQuestionAnsweringModelOutput:
        """Compute start and end logits (batch, length), and the mean of the two losses with both positions.

        Unlike in transformers, the softmax excludes padding. Other arguments as in the encoder's forward.

        Args:
            start_positions, end_positions: (batch,) columns of the answer's first and last token; positions outside the
                sequence are ignored, as in transformers.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self.extra_ids(langs=langs, task_type_ids=task_type_ids),
            **kwargs,
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = logits[..., 0].contiguous(), logits[..., 1].contiguous()
        loss = None
        if start_positions is not None and end_positions is not None:
            padding = padding_of_inputs(attention_mask, kwargs.get("sequence_ids"))
            start_loss = position_loss(start_logits, start_positions, padding, "start_positions", num_items_in_batch)
            end_loss = position_loss(end_logits, end_positions, padding, "end_positions", num_items_in_batch)
            loss = (start_loss + end_loss) / 2
            loss = self.add_regularization(loss, outputs, start_positions, "start_positions", num_items_in_batch)
        return self.output_class(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **self.encoder_fields(outputs)
        )


class ForMultipleChoice(HeadModel):
    """A logit for each of several choices, each encoded with the context (Devlin et al. 2019, section 4.4)."""

    uses_pooled_output = True
    has_configurable_pooling = True
    supports_layer_mix = True
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    output_class: ClassVar[type[MultipleChoiceModelOutput]] = MultipleChoiceModelOutput

    def build_head(self, config: Any) -> None:
        """Create dropout, a linear layer from the pooled output to one logit, and `output_layer_name`, if it is set."""
        self.dropout: nn.Module = Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.pooler_size, 1)
        if self.output_layer_name is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

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
        langs: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Compute logits (batch, choices), and the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, langs, task_type_ids: (batch, choices, length).
            inputs_embeds: (batch, choices, length, hidden), instead of `input_ids`.
            labels: (batch,) index of the correct choice.
            choice_mask: (batch, choices), 0 at padding choices, whose logits become the lowest number.
        """
        token_arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            **self.extra_ids(langs=langs, task_type_ids=task_type_ids),
        }
        batch_size, choices = _check_choices(token_arguments, choice_mask)
        flattened = {
            name: None if tensor is None else on_host(lambda rows: rows.flatten(0, 1), tensor)
            for name, tensor in token_arguments.items()
        }
        outputs = self.encode(**flattened, **kwargs)
        logits = self.score(outputs.pooler_output, choices).view(batch_size, choices)
        if choice_mask is not None:
            logits = logits.masked_fill(choice_mask == 0, torch.finfo(logits.dtype).min)
        loss = None
        if labels is not None:
            targets = validate_sequence_targets(labels, "labels", batch_size)
            if choice_mask is not None:
                _check_not_excluded(targets, on_host(lambda mask: mask == 0, choice_mask), "labels", "choice_mask is 0")
            loss = cross_entropy_over_targets(logits, targets, "labels", num_items_in_batch)
            loss = self.add_regularization(loss, outputs, targets, "labels", num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, **self.encoder_fields(outputs))


def _check_choices(token_arguments: dict[str, Tensor | None], choice_mask: Tensor | None) -> tuple[int, int]:
    """(batch, choices) of the inputs; raises CtxError if the arguments have other or different axes."""
    check_tensors(**token_arguments, choice_mask=choice_mask)
    input_ids, inputs_embeds = token_arguments["input_ids"], token_arguments["inputs_embeds"]
    inputs = input_ids if input_ids is not None else inputs_embeds
    if inputs is None or inputs.dim() != (3 if input_ids is not None else 4):
        raise CtxError(
            "Multiple choice takes input_ids (batch, choices, length) or inputs_embeds (batch, choices, length, "
            f"hidden); got {None if inputs is None else tuple(inputs.shape)}."
        )
    for name, tensor in token_arguments.items():
        if tensor is not None and (tensor.dim() < 3 or tensor.shape[:2] != inputs.shape[:2]):
            raise CtxError(
                f"{name} is {tuple(tensor.shape)}, expected (batch, choices, ...) with the batch and choices of the "
                f"input, {tuple(inputs.shape[:2])}."
            )
    if choice_mask is not None and choice_mask.shape != inputs.shape[:2]:
        raise CtxError(f"choice_mask is {tuple(choice_mask.shape)}, expected {tuple(inputs.shape[:2])}.")
    return inputs.shape[0], inputs.shape[1]


def _check_not_excluded(targets: Tensor, excluded: Tensor, name: str, reason: str) -> None:
    """Raise CtxError if a (batch,) class index is excluded by a (batch, classes) bool mask. Skipped while compiling."""
    if torch.compiler.is_compiling():
        return
    targets, excluded = host_copy(targets), host_copy(excluded)
    is_class = (targets >= 0) & (targets < excluded.shape[1])
    misplaced = excluded.gather(1, targets.where(is_class, 0)[:, None])[:, 0] & is_class
    if bool(misplaced.any()):
        row = int(misplaced.nonzero()[0])
        raise CtxError(f"{name}[{row}] is {int(targets[row])}, which is excluded: {reason}.")


def padding_of_inputs(attention_mask: Any, sequence_ids: Tensor | None) -> Tensor | None:
    """(batch, length) bool, True at padding; None without a mask of this shape. Arguments as in the encoder's
    forward."""
    token_mask = nonzero_in_all(padding_mask_or_none(attention_mask), sequence_ids)
    return None if token_mask is None else on_host(torch.logical_not, token_mask)


def position_loss(
    scores: Tensor,
    positions: Tensor,
    excluded: Tensor | None,
    name: str,
    num_items: ItemCounts,
    *,
    reason: str = "padding",
) -> Tensor:
    """Mean cross-entropy in nats of choosing a position by (batch, length) scores.

    Args:
        positions: (batch,); positions outside the sequence are ignored.
        excluded: (batch, length) bool, positions excluded from the softmax, or None. A target there is a CtxError.
        name, num_items: As in `number_of_targets`.
        reason: The reason of the exclusion.
    """
    positions = validate_sequence_targets(positions, name, len(scores))
    length = scores.shape[-1]
    positions = on_host(lambda ids: ids.masked_fill((ids < 0) | (ids >= length), IGNORE_INDEX), positions)
    if excluded is not None:
        _check_not_excluded(positions, excluded, name, reason)
        scores = scores.masked_fill(excluded, torch.finfo(scores.dtype).min)
    return cross_entropy_over_targets(scores, positions, name, num_items)
