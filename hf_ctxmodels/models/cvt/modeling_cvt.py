"""CVT (Clark et al. 2018, arXiv 1809.08370): predictions from partial views are trained to match the full view."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.character_models import (
    CharacterModel,
    CharacterPreTrainedModel,
    build_character_vectors,
    second_text_mask,
)
from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, zero_padding
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, on_host, select_true
from hf_ctxmodels.core.inputs import check_aligned, check_tensors
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts, cross_entropy_over_targets, mean_over_targets
from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers
from hf_ctxmodels.layers.pooling import Pooling, PoolingLayer, build_token_mask, pair_features, pool_tokens, text_masks
from hf_ctxmodels.layers.recurrent.packing import run_layer
from hf_ctxmodels.models.cvt.configuration_cvt import TEXT_VIEWS, WORD_VIEWS, CtxCvtConfig


class CtxCvtPreTrainedModel(CharacterPreTrainedModel):
    """Base class of the CVT models."""

    config: CtxCvtConfig
    base_model_prefix = "cvt"


class CtxCvtModel(CharacterModel, CtxCvtPreTrainedModel):
    """Word representations from characters and pretrained vectors, with bidirectional LSTM layers.

    With `returns_final_states`, `pooler_output` is (batch, hidden), the final states of both directions of the last
    layer, for a decoder.
    """

    returns_final_states = False

    def __init__(self, config: CtxCvtConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.vectors = build_character_vectors(config)
        config.validate_views()
        self.build_encoder(config, config.hidden_size - config.pretrained_embedding_size, config.hidden_size)
        self.post_init()

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, words, characters) ids -> (batch, words, hidden), with the pretrained vectors."""
        words = super().embed_ids(input_ids)
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
            output_mask,
            width=config.hidden_size,
            position_ids=kwargs.get("position_ids"),
        )
        if self.returns_final_states and sequence_ids is not None:
            raise CtxError("Final states cannot be combined with sequence_ids, which has several sequences per row.")
        packing = inputs.pack(2)
        words = zero_padding(inputs.embed(self.embed_ids), inputs.token_mask)
        word_rate = config.word_dropout if dropout_rate is None else dropout_rate
        rate = config.hidden_dropout_prob if dropout_rate is None else dropout_rate
        states = [words]
        for number, layer in enumerate(self.layers[:layers]):
            layer_input = states[-1] if number else dropout(words, word_rate, self.training)
            states.append(dropout(run_layer(layer, layer_input, packing), rate, self.training))
        return BaseModelOutputWithPooling(
            last_hidden_state=states[-1] if output_mask is None else select_true(states[-1], output_mask),
            pooler_output=pool_tokens(states[-1], inputs.token_mask, "ends") if self.returns_final_states else None,
            hidden_states=tuple(states) if config.returns_hidden_states(output_hidden_states) else None,
        )


class Predictor(LinearLayers):
    """Classifier with one hidden layer (section 3.2)."""

    def __init__(self, input_size: int, hidden_size: int, labels: int) -> None:
        super().__init__(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, labels))


def build_view_modules(
    config: CtxCvtConfig, names: Iterable[str], build_module: Callable[[], nn.Module]
) -> nn.ModuleDict:
    """Create a module "<name>_view" for each view among `names` that `config.views` selects; the suffix is needed since
    "forward" is not a valid name in a ModuleDict."""
    selected = [name for name in names if config.views is None or name in config.views]
    return nn.ModuleDict({f"{name}_view": build_module() for name in selected})


class CrossViewPredictors(nn.Module):
    """Primary prediction of words or texts, and auxiliary predictions from partial views (sections 3.2 and 4.1).

    A view of a word is one direction of the first layer, at the word ("forward", "backward"), or at the previous
    ("future") or the next word ("past"), which excludes the word itself. The paper has no text classifier. Here, a view
    of a text is one direction of the first layer, pooled over all words ("forward", "backward"), or over the half that
    this direction reads first ("beginning", "end").

    Args:
        pooling: Pooling of the words of a text; None to predict words.
    """

    def __init__(self, config: CtxCvtConfig, labels: int, pooling: Pooling | None = None) -> None:
        super().__init__()
        names = WORD_VIEWS if pooling is None else TEXT_VIEWS
        factor, size = 2 if pooling == "mean+max" else 1, config.prediction_size
        self.text_pairs = config.text_pairs and pooling is not None
        factor *= 4 if self.text_pairs else 1
        self.pooler = None if pooling is None else PoolingLayer(pooling)
        self.primary = Predictor(factor * config.head_input_size, size, labels)
        self.auxiliary = build_view_modules(
            config, names, lambda: Predictor(factor * config.projection_size, size, labels)
        )

    def forward(self, states: Tensor, sequences: Tensor) -> Tensor:
        """(batch, words, input) states and (batch, words) sequence numbers, 0 at padding -> (batch, words, labels) or
        (batch, labels) logits."""
        return self.primary(states if self.pooler is None else self._pool(states, self._texts(sequences)))

    def _texts(self, sequences: Tensor) -> list[Tensor]:
        """(batch, words) bool of the text, or of each text of a pair."""
        token_mask = sequences != 0
        return [*text_masks(token_mask, sequences > 1).chunk(2)] if self.text_pairs else [token_mask]

    def _pool(self, states: Tensor, texts: list[Tensor]) -> Tensor:
        assert self.pooler is not None  # only predictions of texts are pooled
        vectors = [self.pooler(states, text) for text in texts]
        return pair_features(*vectors) if self.text_pairs else vectors[0]

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """View name -> logits, from the (batch, words, 2 * width) states of the bidirectional first layer and the
        (batch, words) sequence numbers, 0 at padding."""
        forward, backward = states.chunk(2, -1)
        if self.pooler is None:
            future, past = _neighbors(forward, sequences, 1), _neighbors(backward, sequences, -1)
            views = {"forward": forward, "backward": backward, "future": future, "past": past}
        else:
            texts = self._texts(sequences)
            halves = [(text, 2 * text.cumsum(1), text.sum(1, keepdim=True) + 1) for text in texts]
            views = {
                "forward": self._pool(forward, texts),
                "backward": self._pool(backward, texts),
                "beginning": self._pool(forward, [text & (index <= middle) for text, index, middle in halves]),
                "end": self._pool(backward, [text & (index >= middle) for text, index, middle in halves]),
            }
        names = [name.removesuffix("_view") for name in self.auxiliary]
        return {name: self.auxiliary[f"{name}_view"](views[name]) for name in names}


def _neighbors(states: Tensor, sequences: Tensor, offset: int) -> Tensor:
    """The state of the word `offset` before each word; zeros if it belongs to another sequence or is padding."""
    neighbors, neighbor_sequences = states.roll(offset, 1), sequences.roll(offset, 1)
    has_neighbor = (neighbor_sequences == sequences) & (sequences != 0)
    has_neighbor[:, 0 if offset > 0 else -1] = False
    return zero_padding(neighbors, has_neighbor)


def summed_consistency_loss(
    teacher: Tensor, students: dict[str, Tensor], problem_type: str = "single_label_classification"
) -> Tensor:
    """Kullback-Leibler divergence D(teacher || student) in nats of (predictions, labels) logits, summed over
    predictions and students (section 3.2); the teacher gets no gradient.

    "multi_label_classification" has one distribution per label, "regression" the squared distance.
    """
    teacher = teacher.detach().float()
    total = teacher.new_zeros(())
    for logits in students.values():
        logits = logits.float()
        if problem_type == "regression":
            total = total + F.mse_loss(logits, teacher, reduction="sum")
        elif problem_type == "multi_label_classification":
            probabilities = teacher.sigmoid()
            cross_entropy = F.binary_cross_entropy_with_logits(logits, probabilities, reduction="sum")
            entropy = F.binary_cross_entropy_with_logits(teacher, probabilities, reduction="sum")
            total = total + cross_entropy - entropy
        else:
            total = total + F.kl_div(F.log_softmax(logits, -1), F.softmax(teacher, -1), reduction="sum")
    return total


def has_view_targets(views: Tensor) -> bool:
    """Whether `views` has a target; raises CtxError for values other than 0, 1 and -100."""
    views = host_copy(views)
    target_mask = views != IGNORE_INDEX
    if bool((invalid := target_mask & ((views < 0) | (views > 1))).any()):
        raise CtxError(f"views has {int(views[invalid][0])}, outside [0, 2) and not -100 (ignored).")
    return bool(target_mask.any())


@dataclass
class CtxCvtOutput(ModelOutput):
    """Output of the heads.

    Attributes:
        loss: Sum of the supervised loss and the weighted loss of the views.
        logits: (batch, words, labels) or (batch, labels) of the primary prediction.
        supervised_loss: Cross-entropy of the primary prediction, in nats per label; None without labels.
        cross_view_loss: `view_weight` times the summed Kullback-Leibler divergence of the auxiliary predictions, in
            nats per prediction; None without `views`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    supervised_loss: Tensor | None = None
    cross_view_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None


class CtxCvtHeadModel(heads.HeadModel, CtxCvtPreTrainedModel):
    """Base class of the semi-supervised heads (sections 2 and 3).

    On unlabeled text, auxiliary predictions from partial views are trained to match the primary prediction, which is
    computed without dropout. With `has_word_views` predictions are made for words, otherwise for texts.
    """

    encoder_class = CtxCvtModel
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "views")
    accepts_loss_kwargs = False
    has_word_views: ClassVar[bool] = False

    def problem_type(self, labels: Tensor | None) -> str:
        """Problem type, as `config.problem_type`."""
        return self.config.problem_type or "single_label_classification"

    def supervised_loss(self, logits: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean loss of the primary prediction."""
        return cross_entropy_over_targets(logits, labels, "labels", num_items)

    def build_head(self, config: CtxCvtConfig) -> None:
        """Create the predictors of all tasks."""
        tasks = config.tasks or {"task": [""] * config.num_labels}
        self.predictors = nn.ModuleDict(
            {name: self.build_predictors(config, len(labels)) for name, labels in tasks.items()}
        )

    def build_predictors(self, config: CtxCvtConfig, labels: int) -> nn.Module:
        """Create the primary and the auxiliary predictors of a task."""
        return CrossViewPredictors(config, labels, None if self.has_word_views else config.pooling)

    def resolve_task(self, task: str | None) -> str:
        """The name of a task, by default of the first by name; raises CtxError for an unknown name."""
        task = next(iter(self.predictors)) if task is None else task
        if task not in self.predictors:
            raise CtxError(f"There is no task {task!r}.", hint=f"use one of {', '.join(self.predictors)}.")
        return task

    def number_words(self, token_mask: Tensor, sequence_ids: Tensor | None, input_ids: Tensor | None) -> Tensor:
        """(batch, words) numbers of the sequences for the predictors; 0 at padding, where the (batch, words) bool
        `token_mask` is False."""
        return token_mask.long() if sequence_ids is None else sequence_ids * token_mask

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
            task: Task of labels and logits, one of `config.tasks`; None for the first by name.
        """
        task = self.resolve_task(task)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        if self.config.text_pairs and not self.has_word_views and sequence_ids is None:
            sequence_ids = self._number_texts(input_ids, inputs_embeds, kwargs.get("token_type_ids"))
        inputs |= {"sequence_ids": sequence_ids, **kwargs}
        check_tensors(labels=labels, attention_mask=attention_mask)
        shape = self.input_shape(input_ids, inputs_embeds)
        trains_views = False
        if views is not None and shape is not None:
            views = heads.validate_targets(views, "views", shape if self.has_word_views else shape[:1])
            trains_views = self._has_view_targets(views, attention_mask)
        is_unlabeled = trains_views and (labels is None or not bool((host_copy(labels) != IGNORE_INDEX).any()))
        options: dict[str, Any] = {"layers": 1, "dropout_rate": self.config.view_dropout} if is_unlabeled else {}
        states = self.encode(output_hidden_states=True, **options, **inputs).hidden_states
        token_mask = build_token_mask(states[0], attention_mask, sequence_ids)
        sequences = self.number_words(token_mask, sequence_ids, input_ids)
        logits = supervised_loss = cross_view_loss = metrics = None
        if not is_unlabeled:
            logits = self.predictors[task](torch.cat(states[1:], -1), sequences)
            if labels is not None:
                supervised_loss = self.supervised_loss(logits, labels, num_items_in_batch)
                if self.problem_type(labels) == "single_label_classification":
                    labels = labels.reshape(logits.shape[:-1])
                    metrics = {"accuracy": heads.accuracy_counts(logits, labels)}
        if trains_views and views is not None:
            summed_loss = self._summed_view_loss(states[1], sequences, heads.mask_of_targets(views), inputs)
            mean_loss = mean_over_targets(summed_loss, views, "views", num_items_in_batch)
            cross_view_loss = self.config.view_weight * mean_loss
        return CtxCvtOutput(
            loss=self.with_unused_parameters(self.total_loss(supervised_loss, cross_view_loss)),
            logits=logits,
            hidden_states=states if self.config.returns_hidden_states(output_hidden_states) else None,
            supervised_loss=None if supervised_loss is None else supervised_loss.detach(),
            cross_view_loss=None if cross_view_loss is None else cross_view_loss.detach(),
            metrics=metrics,
        )

    def _number_texts(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, token_type_ids: Tensor | None
    ) -> Tensor | None:
        """(batch, words) 1 in the first and 2 in the second text, which has `token_type_ids` above 0 or begins at the
        second `<S>`; None for one text, and for an input for which the encoder will raise an error."""
        if token_type_ids is not None:
            return on_host(lambda types: 1 + (types != 0).long(), token_type_ids)
        if input_ids is None or self.input_shape(input_ids, inputs_embeds) is None:
            return None
        return on_host(lambda second: 1 + second.long(), second_text_mask(input_ids))

    def _has_view_targets(self, views: Tensor, mask: Tensor | None) -> bool:
        """Whether `views` has a target; raises CtxError for invalid values, and for targets at padding."""
        has_targets = has_view_targets(views)
        if self.has_word_views and mask is not None:
            check_aligned({"attention_mask": mask}, *views.shape)
            if bool((misplaced := (host_copy(views) != IGNORE_INDEX) & (host_copy(mask) == 0)).any()):
                position = misplaced.nonzero()[0].tolist()
                raise CtxError(f"views has targets at padding, {position}.", hint="use -100 there.")
        return has_targets

    def _summed_view_loss(
        self, first_layer: Tensor, sequences: Tensor, target_mask: Tensor, inputs: dict[str, Any]
    ) -> Tensor:
        """`summed_consistency_loss` of all tasks; the arguments are the inputs of students, teachers and encoder."""
        with torch.no_grad():
            states = self.encode(output_hidden_states=True, dropout_rate=0.0, **inputs).hidden_states
            teachers = {
                name: predictor(torch.cat(states[1:], -1), sequences) for name, predictor in self.predictors.items()
            }
        total = first_layer.new_zeros((), dtype=torch.float32)
        for name, predictor in self.predictors.items():
            view_logits: dict[str, Tensor] = predictor.get_views(first_layer, sequences)  # type: ignore[operator]
            students = {view: select_true(logits, target_mask) for view, logits in view_logits.items()}
            total = total + summed_consistency_loss(
                select_true(teachers[name], target_mask), students, self.problem_type(None)
            )
        return total


class CtxCvtForTokenClassification(CtxCvtHeadModel):
    """A classifier of words, for one task or several (sections 3.2 and 4.1)."""

    has_word_views = True


class CtxCvtForSequenceClassification(CtxCvtHeadModel):
    """A classifier of texts. The paper has no such task; the views are defined by this package."""

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
        """Mean loss by `problem_type`."""
        return heads.sequence_loss(self.config, logits, labels, num_items)


class CtxCvtForQuestionAnswering(heads.ForQuestionAnswering, CtxCvtPreTrainedModel):
    """Start and end logits of each word's states in all layers, without auxiliary predictions; question and context are
    one sequence."""

    encoder_class = CtxCvtModel
    supports_layer_mix = False

    def encode(self, *, output_hidden_states: bool | None = None, **inputs: Any) -> Any:
        """Run the encoder; `last_hidden_state` concatenates the outputs of all layers (section 3.2)."""
        outputs = super().encode(output_hidden_states=True, **inputs)
        outputs.last_hidden_state = torch.cat(outputs.hidden_states[1:], -1)
        if not self.config.returns_hidden_states(output_hidden_states):
            outputs.hidden_states = None
        return outputs
