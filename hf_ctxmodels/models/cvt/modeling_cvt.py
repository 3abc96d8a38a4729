"""CVT (Clark et al. 2018, arXiv 1809.08370): predictions from partial views are trained to match the full view."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.character_models import (
    CharacterModel,
    CharacterPreTrainedModel,
    build_character_vectors,
)
from hf_ctxmodels.architectures.recurrent_inputs import prepare_inputs, zero_padding
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_aligned, check_tensors
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts, cross_entropy_over_targets, mean_over_targets
from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent.packing import run_layer
from hf_ctxmodels.models.cvt.configuration_cvt import CtxCvtConfig
from hf_ctxmodels.models.cvt.cross_view import TextPredictors, WordPredictors, summed_consistency_loss


class CtxCvtPreTrainedModel(CharacterPreTrainedModel):
    """Base class of the CVT models."""

    config: CtxCvtConfig
    base_model_prefix = "cvt"


class CtxCvtModel(CharacterModel, CtxCvtPreTrainedModel):
    """Word representations from characters and pretrained vectors, with bidirectional LSTM layers."""

    def __init__(self, config: CtxCvtConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.vectors = build_character_vectors(config)
        config.validate_views()
        self.build_encoder(config, config.hidden_size - config.pretrained_embedding_size, config.hidden_size)
        self.post_init()

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, words, characters) ids -> (batch, words, hidden)."""
        words = self.encode_words(input_ids.flatten(0, 1)).unflatten(0, input_ids.shape[:2])
        return words if self.vectors is None else torch.cat([words, self.vectors(input_ids).to(words.dtype)], -1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        layers: int | None = None,
        dropout_rate: float | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        Args:
            output_hidden_states: Return `hidden_states`: the word representations and the layers' outputs.
            layers: Number of layers to run; None for all.
            dropout_rate: In training mode, replaces `config.word_dropout` and `config.hidden_dropout_prob`.
            kwargs: Ignored arguments of other families' models.
        """
        config = self.config
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            sequence_ids,
            width=config.hidden_size,
            output_mask=output_mask,
        )
        packing = inputs.pack(2)
        words = zero_padding(inputs.embed(self.embed_ids), inputs.tokens)
        word_rate = config.word_dropout if dropout_rate is None else dropout_rate
        rate = config.hidden_dropout_prob if dropout_rate is None else dropout_rate
        states = [words]
        for number, layer in enumerate(self.layers[:layers]):
            layer_input = states[-1] if number else dropout(words, word_rate, self.training)
            states.append(dropout(run_layer(layer, layer_input, packing), rate, self.training))
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=states[-1] if output_mask is None else states[-1][output_mask],
            hidden_states=tuple(states) if output_hidden_states else None,
        )


@dataclass
class CtxCvtOutput(ModelOutput):
    """Output of the heads.

    Attributes:
        loss: Sum of the supervised loss and the weighted loss of the views.
        logits: (batch, words, labels) or (batch, labels) of the primary prediction.
        hidden_states: See `CtxCvtModel.forward`.
        supervised_loss: Cross-entropy of the primary prediction, in nats per label; None without labels.
        cross_view_loss: `view_weight` times the summed Kullback-Leibler divergence of the auxiliary predictions, in
            nats per prediction; None without `views`.
        metrics: Accuracy of the primary prediction of classes, see `heads.accuracy_counts`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    supervised_loss: Tensor | None = None
    cross_view_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None


class CtxCvtHeadModel(heads.HeadModel, CtxCvtPreTrainedModel):
    """Base class of the semi-supervised heads (section 3).

    On unlabelled text, auxiliary predictions from partial views are trained to match the primary prediction, which is
    computed without dropout. All share the encoder.

    Attributes:
        has_word_views: Whether predictions are made for words, otherwise for texts.
        predictors: Task -> primary and auxiliary predictors, see `cross_view`.
    """

    encoder_class = CtxCvtModel
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "views")
    accepts_loss_kwargs = False
    has_word_views: ClassVar[bool] = False
    predictors: nn.ModuleDict

    def build_predictor(self, labels: int) -> nn.Module:
        """Create the predictors of a task with this number of labels."""
        raise NotImplementedError

    def problem_type(self, labels: Tensor | None) -> str:
        """Problem type: "regression", "single_label_classification" or "multi_label_classification"."""
        return self.config.problem_type or "single_label_classification"

    def supervised_loss(self, logits: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean loss of the primary prediction."""
        return cross_entropy_over_targets(logits, labels, "labels", num_items)

    def build_head(self, config: CtxCvtConfig) -> None:
        """Create the predictors of all tasks."""
        tasks = config.tasks or {"task": [""] * config.num_labels}
        self.predictors = nn.ModuleDict({name: self.build_predictor(len(labels)) for name, labels in tasks.items()})

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        views: Tensor | None = None,
        task: str | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> CtxCvtOutput:
        """Compute logits, and the loss with `labels` or `views`. Other arguments as in `CtxCvtModel.forward`.

        Args:
            labels: (batch, words) or, for texts, (batch,) classes of `task`; -100 is ignored.
            views: (batch, words) or (batch,): 1 where the auxiliary predictions of all tasks are trained, else -100.
            task: Task of labels and logits, one of `config.tasks`; None for the first.
        """
        predictor = self.predictors[self._resolve_task(task)]
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "sequence_ids": sequence_ids,
            **kwargs,
        }
        check_tensors(labels=labels, attention_mask=attention_mask)
        shape = self.input_shape(input_ids, inputs_embeds)
        if views is not None and shape is not None:
            views = heads.validate_targets(views, "views", shape if self.has_word_views else shape[:1])
        trains_views = views is not None and shape is not None and self._has_view_targets(views, attention_mask)
        is_unlabelled = trains_views and (labels is None or not bool((labels != IGNORE_INDEX).any()))
        student_options: dict[str, Any] = (
            {"layers": 1, "dropout_rate": self.config.view_dropout} if is_unlabelled else {}
        )
        states = self.encode(output_hidden_states=True, **student_options, **inputs).hidden_states
        tokens = token_mask(states[0], attention_mask, sequence_ids)
        logits = supervised_loss = cross_view_loss = metrics = None
        if not is_unlabelled:
            logits = predictor(torch.cat(states[1:], -1), tokens)
            if labels is not None:
                supervised_loss = self.supervised_loss(logits, labels, num_items_in_batch)
                if self.problem_type(labels) == "single_label_classification":
                    labels = labels.reshape(logits.shape[:-1])
                    metrics = {"accuracy": heads.accuracy_counts(logits, labels)}
        if trains_views and views is not None:
            sequences = tokens.long() if sequence_ids is None else sequence_ids
            summed_loss = self._summed_view_loss(states[1], sequences, tokens, views != IGNORE_INDEX, inputs)
            cross_view_loss = self.config.view_weight * mean_over_targets(
                summed_loss, views, "views", num_items_in_batch
            )
        loss = supervised_loss if cross_view_loss is None else cross_view_loss
        if supervised_loss is not None and cross_view_loss is not None:
            loss = supervised_loss + cross_view_loss
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return CtxCvtOutput(
            loss=self.with_unused_parameters(loss),
            logits=logits,
            hidden_states=states if output_hidden_states else None,
            supervised_loss=None if supervised_loss is None else supervised_loss.detach(),
            cross_view_loss=None if cross_view_loss is None else cross_view_loss.detach(),
            metrics=metrics,
        )

    def _has_view_targets(self, views: Tensor, mask: Tensor | None) -> bool:
        """Whether `views` has a target; raises CtxError for invalid values, and for targets at padding."""
        if self.has_word_views and mask is not None:
            check_aligned({"attention_mask": mask}, *views.shape)
        target_mask = views != IGNORE_INDEX
        if bool((invalid := target_mask & ((views < 0) | (views > 1))).any()):
            raise CtxError(f"views has {int(views[invalid][0])}, outside [0, 2) and not -100 (ignored).")
        if self.has_word_views and mask is not None and bool((misplaced := target_mask & (mask == 0)).any()):
            raise CtxError(f"views has targets at padding, {misplaced.nonzero()[0].tolist()}.", hint="use -100 there.")
        return bool(target_mask.any())

    def _resolve_task(self, task: str | None) -> str:
        name = next(iter(self.predictors)) if task is None else task
        if name not in self.predictors:
            raise CtxError(f"There is no task {name!r}.", hint=f"use one of {', '.join(self.predictors)}.")
        return name

    def _summed_view_loss(
        self, first_layer: Tensor, sequences: Tensor, tokens: Tensor, target_mask: Tensor, inputs: dict[str, Any]
    ) -> Tensor:
        """Kullback-Leibler divergence of teachers and students, summed over tasks, views and targets.

        Args:
            first_layer: (batch, words, width) first-layer states of the students.
            sequences: (batch, words) sequence numbers, 0 at padding.
            tokens: (batch, words) bool, False at padding.
            target_mask: Bool, the shape of `views`.
            inputs: Inputs of the encoder.
        """
        with torch.no_grad():
            states = self.encode(output_hidden_states=True, dropout_rate=0.0, **inputs).hidden_states
            teachers = {
                name: predictor(torch.cat(states[1:], -1), tokens) for name, predictor in self.predictors.items()
            }
        total = first_layer.new_zeros((), dtype=torch.float32)
        for name, predictor in self.predictors.items():
            view_logits: dict[str, Tensor] = predictor.get_views(first_layer, sequences)  # type: ignore[operator]
            students = {view: logits[target_mask] for view, logits in view_logits.items()}
            total = total + summed_consistency_loss(teachers[name][target_mask], students, self.problem_type(None))
        return total


class CtxCvtForTokenClassification(CtxCvtHeadModel):
    """A classifier of words, for one task or several (sections 3.2 and 4.1)."""

    has_word_views = True

    def build_predictor(self, labels: int) -> nn.Module:
        """Create the predictors of words."""
        config = self.config
        return WordPredictors(
            config.head_input_size, config.projection_size, config.prediction_size, labels, config.views
        )


class CtxCvtForSequenceClassification(CtxCvtHeadModel):
    """A classifier of texts. The paper has no such task; the views are defined by this package."""

    def build_predictor(self, labels: int) -> nn.Module:
        """Create the predictors of texts."""
        config = self.config
        return TextPredictors(
            config.head_input_size,
            config.projection_size,
            config.prediction_size,
            labels,
            config.views,
            config.pooling,
        )

    def problem_type(self, labels: Tensor | None) -> str:
        """Problem type, see `heads.ForSequenceClassification`; it must be equal for batches without labels.

        Raises:
            CtxError: The labels are multi-label, but `config.problem_type` is None.
        """
        problem_type = heads.infer_problem_type(self.config, labels)
        if problem_type != heads.infer_problem_type(self.config, None):
            raise CtxError(
                "The labels are multi-label, but config.problem_type is None, which means one class per text.",
                hint='set config.problem_type="multi_label_classification".',
            )
        return problem_type

    def supervised_loss(self, logits: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean loss by `problem_type`; see `heads.ForSequenceClassification`."""
        return heads.sequence_loss(self.config, logits, labels, num_items)
