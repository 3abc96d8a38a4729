"""Pretraining heads of several tasks: masked tokens, and whatever else a family predicts of tokens or of rows."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads.base import (
    IGNORE_INDEX,
    ItemCounts,
    accuracy_counts,
    cross_entropy_over_targets,
    has_targets,
    validate_sequence_targets,
    validate_targets,
)
from hf_ctxmodels.heads.masked_lm import ForMaskedLM


@dataclass(frozen=True)
class PretrainingTask:
    """One term of a pretraining loss.

    Attributes:
        name: The output has `<name>_loss`, and its `metrics` `<name>_accuracy`.
        target: The argument of `forward` for its targets; -100 is ignored.
        head: Attribute of the model with the task's classifier; None for the masked-LM head.
        logits: The output's field for its logits; None if they are not returned.
        of_tokens: Whether the targets are (batch, length), one for each token; else (batch,), one for each row, and the
            classifier reads the pooled output.
    """

    name: str
    target: str
    head: str | None = None
    logits: str | None = None
    of_tokens: bool = False


MASKED_LM = PretrainingTask("mlm", "labels", logits="prediction_logits", of_tokens=True)


class Prediction(NamedTuple):
    """What a head says of one task; None for what is not there.

    Attributes:
        loss: The mean over targets.
        logits: Those of all tokens or rows.
        metrics: See `accuracy_counts`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    metrics: Mapping[str, Tensor] | None = None


class ForMaskedLMWithTasks(ForMaskedLM):
    """Predicts masked tokens and the targets of further tasks.

    The loss is the sum of the terms with targets, each a mean over its own targets: Trainer's single
    `num_items_in_batch` cannot describe several terms, so the head does not accept it (`accepts_loss_kwargs`). The last
    layer and the logits of tasks of tokens are computed only at tokens with a target of any task, unless
    `returns_logits`.

    A family sets `tasks` and creates their classifiers in `build_head`. The arguments of `forward` for the targets,
    `loss_targets`, `loss_terms`, `pools` and `output_class` follow from the tasks.

    Attributes:
        tasks: The tasks beside masked tokens.
        loss_terms: Names of the terms, in the order of `loss_targets`.
        output_class: The class of the output, see `pretraining_output_class`.
    """

    accepts_loss_kwargs = False
    tasks: ClassVar[tuple[PretrainingTask, ...]]
    loss_terms: ClassVar[tuple[str, ...]]
    output_class: ClassVar[type[ModelOutput]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set the attributes that depend on the tasks."""
        if "tasks" in vars(cls):
            every = (MASKED_LM, *cls.tasks)
            cls.loss_targets = tuple(task.target for task in every)
            cls.loss_terms = tuple(f"{task.name}_loss" for task in every)
            cls.pools = not all(task.of_tokens for task in every)
            own = [task.logits for task in cls.tasks if task.logits is not None]
            cls.output_class = pretraining_output_class(cls, [*own, *cls.loss_terms])
            cls.forward = with_targets(ForMaskedLMWithTasks.forward, cls.loss_targets)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        targets: Mapping[str, Any] | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits of all heads, and the loss.

        Args:
            targets: Those of each task, which are arguments of their own here: `labels` (batch, length), ids of the
                masked tokens, and the `target` of each of `tasks`.
            num_items_in_batch: As in `mean_over_targets`.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder.
        """
        known = self.check_targets({} if targets is None else targets, input_ids, inputs_embeds)
        output_mask = None if self.returns_logits(return_logits) else self.output_mask(known)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **kwargs,
        )
        every = [task for task in (MASKED_LM, *self.tasks) if self.has_task(task)]
        found = {task: self.predict(task, outputs, known, output_mask, num_items_in_batch) for task in every}
        terms = {task: each.loss for task, each in found.items() if each.loss is not None}
        loss = torch.stack([*terms.values()]).sum() if terms else None
        return self.output_class(
            loss=self.with_unused_parameters(loss) if len(terms) < len(every) else loss,
            metrics={name: counts for each in found.values() for name, counts in (each.metrics or {}).items()} or None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{task.logits: each.logits for task, each in found.items() if task.logits is not None},
            **{f"{task.name}_loss": term.detach() for task, term in terms.items() if has_targets(known[task.target])},
        )

    def has_task(self, task: PretrainingTask) -> bool:
        """Whether this model has the task's classifier."""
        return True

    def check_targets(self, targets: Mapping[str, Any], input_ids: Any, inputs_embeds: Any) -> dict[str, Tensor]:
        """The targets that are given, by argument.

        Raises:
            CtxError: They are no integers or of another shape than the tokens; or of a task that the model lacks.
        """
        known: dict[str, Tensor] = {}
        for task in (MASKED_LM, *self.tasks):
            tensor = targets.get(task.target)
            if task.of_tokens:
                tensor = self.validate_token_targets(tensor, task.target, input_ids, inputs_embeds)
            elif tensor is not None:
                tensor = validate_targets(tensor, task.target)
            if tensor is not None and self.has_task(task):
                known[task.target] = tensor
            elif has_targets(tensor):
                raise CtxError(
                    f"{task.target} are given, but the model has no task {task.name!r}.",
                    hint="add it to config.pretraining_tasks, which has "
                    f"{', '.join(each.name for each in self.tasks if self.has_task(each)) or 'none'}.",
                )
        return known

    def output_mask(self, targets: Mapping[str, Tensor]) -> Tensor | None:
        """(batch, length) True at tokens whose states the tasks read; None for all.

        Args:
            targets: See `check_targets`.
        """
        names = [task.target for task in (MASKED_LM, *self.tasks) if task.of_tokens]
        masks = [targets[name] != IGNORE_INDEX for name in names if name in targets]
        return torch.stack(masks).any(0) if masks else None

    def predict(
        self,
        task: PretrainingTask,
        outputs: Any,
        targets: Mapping[str, Tensor],
        output_mask: Tensor | None,
        counts: ItemCounts,
    ) -> Prediction:
        """A task's loss, logits and accuracy.

        Args:
            task: The task.
            outputs: The encoder's, with the states of the tokens of `output_mask` only, if that is given.
            targets: See `check_targets`.
            output_mask: As the method gave it.
            counts: As in `mean_over_targets`.
        """
        own = targets.get(task.target)
        states = outputs.last_hidden_state if task.of_tokens else outputs.pooler_output
        some = output_mask is not None and task.of_tokens
        if some and own is None:
            return Prediction()
        if some and own is not None and output_mask is not None:
            states = states[(own != IGNORE_INDEX)[output_mask]]
        if task.head is None:
            return Prediction(*self.masked_lm(states, own, counts, not some, task.target))
        logits = self.classify(task, states)
        if own is None:
            return Prediction(logits=logits)
        own = own[own != IGNORE_INDEX] if some else own
        own = own if task.of_tokens else validate_sequence_targets(own, task.target, len(logits))
        loss = cross_entropy_over_targets(logits, own, task.target, counts)
        accuracy = {f"{task.name}_accuracy": accuracy_counts(logits.detach(), own)}
        return Prediction(loss, None if some else logits, accuracy)

    def classify(self, task: PretrainingTask, states: Tensor) -> Tensor:
        """(..., hidden) states, or the pooled output of tasks of rows -> (..., classes) logits."""
        assert task.head is not None
        return getattr(self, task.head)(states)


def pretraining_output_class(model_class: type, own: Iterable[str]) -> type[ModelOutput]:
    """The output class of a pretraining head, its name that of the head plus "Output".

    Its fields, in this order: `loss`, the sum of the terms with targets; `prediction_logits` (batch, length,
    vocabulary); the head's `own` ones; `metrics`, see `accuracy_counts`, None without targets; `hidden_states` and
    `attentions` as requested. Logits of tokens are None with targets, unless `returns_logits`. A `<task>_loss` is a
    mean over the task's targets in nats, detached, None without targets.

    Args:
        model_class: The head.
        own: Names of its own fields.
    """
    fields: list[tuple[str, Any]] = [(each, Tensor | None) for each in ("loss", "prediction_logits", *own)]
    fields += [("metrics", dict[str, Tensor] | None)]
    fields += [(each, tuple[Tensor, ...] | None) for each in ("hidden_states", "attentions")]
    with_defaults = [(each, kind, field(default=None)) for each, kind in fields]
    about = {"__module__": model_class.__module__, "__doc__": f"Output of `{model_class.__name__}`."}
    return make_dataclass(f"{model_class.__name__}Output", with_defaults, bases=(ModelOutput,), namespace=about)


def with_targets(function: Callable, targets: Sequence[str]) -> Callable:
    """A `forward` with an argument for each target in place of the mapping `targets`, also in its signature, which
    Trainer inspects."""
    signature = inspect.signature(function)
    shown: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        shown += [each.replace(name=name) for name in targets] if each.name == "targets" else [each]
    order = [each.name for each in shown[:-1]]

    @wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(order[1:], args))
        return function(self, targets={name: kwargs.pop(name, None) for name in targets}, **kwargs)

    forward.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return forward
