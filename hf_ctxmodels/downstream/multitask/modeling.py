"""A shared encoder with a head for each of several tasks (Liu et al. 2019, arXiv 1901.11504, section 3)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.multitask.configuration import CtxMultiTaskConfig
from hf_ctxmodels.downstream.multitask.projected_attention import TaskAttention
from hf_ctxmodels.registry import get_family


@dataclass
class CtxCrossViewOutput(ModelOutput):
    """Output of `CtxMultiTaskModel` for a batch without labels.

    Attributes:
        loss: Sum of the losses of the tasks, in training mode with their weights.
        cross_view_loss: Sum of the losses, detached.
    """

    loss: Tensor | None = None
    cross_view_loss: Tensor | None = None


class CtxMultiTaskModel(CtxPreTrainedModel):
    """An encoder of any family with a head of this family for each task, with task-specific labels and dropout.

    A batch contains examples of one task, the argument `task` of `forward`; `task(name)` is the plain model of a task.

    Attributes:
        encoder: The shared encoder, with a pooler if a head reads one.
        heads: Task -> the family's model with the task's head. Its encoder is `encoder`, but not its submodule.
        task_attention: Projected attention layers of each task; None without `config.projected_attention`.

    Example:
        >>> model = AutoModel.from_pretrained("runs/mtdnn")  # doctest: +SKIP
        >>> model(**tokenizer("A cat sat.", "An animal sat.", return_tensors="pt"), task="rte").logits  # doctest: +SKIP
        >>> model.task("rte").save_pretrained("runs/rte")  # doctest: +SKIP
    """

    config: CtxMultiTaskConfig
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False  # batches of different tasks have different targets

    encoder: CtxPreTrainedModel
    heads: Any  # an nn.ModuleDict, whose members have no common type

    def __init__(self, config: CtxMultiTaskConfig) -> None:
        super().__init__(config)
        heads = {name: config.head_class(name)(config.task_config(name)) for name in config.tasks or {}}
        self.encoder = (
            _select_encoder(heads) if heads else get_family(config.encoder).models["AutoModel"](config.encoder)
        )
        self.heads = nn.ModuleDict(heads)
        for head in heads.values():
            _attach_shared_encoder(head, self.encoder)
        self.task_attention = (
            TaskAttention(self.encoder, heads, **config.projected_attention) if config.projected_attention else None
        )
        targets = dict.fromkeys(name for head in heads.values() for name in head.loss_targets)
        self.loss_targets = tuple(targets)  # type: ignore[misc]  # a class attribute elsewhere
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Weight of a head -> weight of the encoder that it is tied to, for example of an output layer."""
        return {
            f"heads.{task}.{name}": f"encoder.{tied.removeprefix(f'{head.base_model_prefix}.')}"
            for task, head in self.heads.items()
            if getattr(head.config, "tie_word_embeddings", False)
            for name, tied in (head._tied_weights_keys or {}).items()
        }

    def head(self, task: str) -> Any:
        """The head of a task, on the shared encoder; raises CtxError if there is no such task."""
        if not isinstance(task, str) or task not in self.heads:
            raise CtxError(f"The model has no task {task!r}.", hint=f"use one of {', '.join(self.heads)}.")
        return self.heads[task]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        task: str | None = None,
        views: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The output of the head of a task, to which all examples belong, or of the encoder alone without a task.

        Other arguments are the head's. In training mode the loss is multiplied by the task's weight. The task's
        adapters and projected attention layers are activated.

        Args:
            views: (batch, words) or (batch,) targets of cross-view training, see `CtxCvtHeadModel`. Without a task, all
                heads with such a loss learn from the batch.
        """
        self.activate_task(task)
        arguments = {**kwargs, "input_ids": input_ids, "attention_mask": attention_mask, "return_dict": True}
        if task is None:
            return self.encoder(**arguments) if views is None else self._learn_views(views, arguments)
        output = self.head(task)(**arguments, **({} if views is None else {"views": views}))
        if self.training and output.get("loss") is not None:
            output.loss = output.loss * (self.config.tasks or {})[task]["loss_weight"]
        return output

    def activate_task(self, task: str | None) -> None:
        """Activate the adapters (`config.task_adapters`), if they are loaded, and the projected attention layers of a
        task; for None, the adapters that all tasks share. Adapters of models without `task_adapters` are left."""
        if self.task_attention is not None:
            self.task_attention.active = task
        stacks = self.config.task_adapters
        if not stacks:
            return
        # adapters import the training loop, which `import hf_ctxmodels` leaves out
        from hf_ctxmodels.downstream.adapters.management import get_adapter_set, has_adapters

        if not has_adapters(self):
            return
        first_stack = stacks[min(stacks)]  # a saved configuration has sorted keys
        shared = [name for name in first_stack if all(name in stack for stack in stacks.values())]
        adapters, stack = get_adapter_set(self), tuple(shared if task is None else stacks.get(task, ()))
        if adapters.active != stack:
            adapters.check_names(stack)
            adapters.active = stack
            adapters.activate()

    def _learn_views(self, views: Tensor, arguments: dict[str, Any]) -> CtxCrossViewOutput:
        """The cross-view losses of all heads (Clark et al. 2018, section 2.2); a head of texts learns from a text with
        a target, a head of words only from `views` of words."""
        losses, weighted = [], []
        for name, head in self.heads.items():
            predicts_words = getattr(head, "has_word_views", False)
            if "views" not in head.loss_targets or (predicts_words and views.dim() == 1):
                continue
            targets = views
            if not predicts_words and views.dim() == 2:
                targets = (views != IGNORE_INDEX).any(1).long()
                targets = targets.masked_fill(targets == 0, IGNORE_INDEX)
            self.activate_task(name)
            loss = head(**arguments, views=targets).loss
            losses.append(loss.detach())
            weighted.append(loss * ((self.config.tasks or {})[name]["loss_weight"] if self.training else 1.0))
        if not losses:
            raise CtxError("No task learns from these views.", hint="use heads with a cross-view loss, such as cvt's.")
        return CtxCrossViewOutput(loss=sum(weighted), cross_view_loss=sum(losses))

    def task_weights(self, task: str) -> dict[str, Tensor]:
        """The weights of a task's plain model by their names there, also of a pooler that the head does not read."""
        head = self.head(task)
        encoder = {f"{head.base_model_prefix}.{name}": value for name, value in self.encoder.state_dict().items()}
        return {**encoder, **head.state_dict()}

    def add_task_attention(self, model: CtxPreTrainedModel, task: str) -> None:
        """Add a copy of a task's projected attention layers, if any, to its plain model, which cannot save them."""
        if self.task_attention is not None:
            attention = TaskAttention(model.base_model, [task], **(self.config.projected_attention or {}))
            attention.members[task].load_state_dict(self.task_attention.members[task].state_dict())
            attention.active = task
            model.task_attention = attention.train(model.training)

    def task(self, name: str) -> CtxPreTrainedModel:
        """The plain model of a task, of the family's class, with a copy of the weights and of the task's adapters, and
        equal outputs; raises CtxError if the model is quantized, has adapters of no task, or projected attention."""
        from hf_ctxmodels.downstream.adapters.management import (
            add_adapter,
            get_adapter_set,
            has_adapters,
            set_active_adapters,
        )

        if is_quantized(self):
            raise CtxError("A quantized model has no plain weights for a task.", hint="use the float32 model.")
        if self.task_attention is not None:
            raise CtxError(
                f"{self.config.head_class(name).__name__} has no projected attention layers.",
                hint="use the multi-task model.",
            )
        stack = (self.config.task_adapters or {}).get(name, ()) if has_adapters(self) else ()
        if has_adapters(self) and not stack:
            raise CtxError(
                "The encoder has adapters, which the plain model of a task would lack.",
                hint="save and delete the adapters, call `task`, and load the adapters by load_adapter.",
            )
        weights = self.task_weights(name)
        plain = self.config.head_class(name)(self.config.task_config(name)).to(device=self.device, dtype=self.dtype)
        for adapter in stack:
            add_adapter(plain, adapter, get_adapter_set(self).configs[adapter])
        plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
        if stack:
            set_active_adapters(plain, stack)
        return plain.train(self.training)


def _attach_shared_encoder(head: Any, encoder: CtxPreTrainedModel) -> None:
    """Replace the encoder of a head by the shared one, an attribute but not a submodule, whose weights are saved once.

    The head's tied weights are in `CtxMultiTaskModel.get_expanded_tied_weights_keys`.
    """
    delattr(head, head.base_model_prefix)
    object.__setattr__(head, head.base_model_prefix, encoder)  # `nn.Module.__setattr__` would register a submodule
    head.all_tied_weights_keys = {}


def _select_encoder(heads: dict[str, Any]) -> CtxPreTrainedModel:
    """The encoder of a head that serves all heads; raises CtxError if they differ in more than an unused pooler."""

    def modules(head: Any, with_pooler: bool) -> set[tuple[Any, ...]]:
        return {
            (name, type(module), tuple(parameter.shape for parameter in module.parameters(recurse=False)))
            for name, module in head.base_model.named_modules()
            if with_pooler or name.split(".")[0] != "pooler"
        }

    largest = max(heads, key=lambda name: (heads[name].uses_pooler, len(heads[name].base_model.state_dict())))
    available = modules(heads[largest], with_pooler=True)
    for name, head in heads.items():
        if not modules(head, with_pooler=head.uses_pooler) <= available:
            raise CtxError(
                f"The tasks {largest} and {name} cannot share an encoder: {type(heads[largest]).__name__} and "
                f"{type(head).__name__} need different encoder modules.",
                hint="train the tasks separately, or use another family.",
            )
    return heads[largest].base_model
