"""Configuration of a shared encoder with heads for several tasks."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig

from hf_ctxmodels.core.config import CtxConfig, is_valid_module_name
from hf_ctxmodels.core.constants import MULTITASK_MODEL_TYPE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.bert import CtxBertConfig
from hf_ctxmodels.registry import get_family

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEYS = {"auto_class", "fields", "loss_weight"}


def check_task_name(name: str, location: str | None = None) -> None:
    """Raise CtxError for an invalid name of a task, which is part of the names of its weights and metrics."""
    if not _NAME.fullmatch(name) or not is_valid_module_name(name):
        raise CtxError(
            f"{name!r} is not a valid name of a task.",
            location=location,
            hint="use letters, digits, - and _, and no name of a method such as `values`; for example rte.",
        )


def task_entry(auto_class: str, config: CtxConfig, loss_weight: float = 1.0) -> dict[str, Any]:
    """The entry of a task in `CtxMultiTaskConfig.tasks`.

    Args:
        auto_class: Auto class of the head, such as "AutoModelForSequenceClassification".
        config: The family's configuration for the head: labels, dropout before the head, answer network, order of
            pairs.
    """
    optional_names = ("answer_steps", "answer_dropout", "both_orders")
    names = ["problem_type", *(name for name in optional_names if hasattr(config, name))]
    fields = {name: getattr(config, name) for name in [*names, config.head_dropout_field]}
    labels = {str(number): label for number, label in (config.id2label or {}).items()}
    return {
        "auto_class": auto_class,
        "loss_weight": loss_weight,
        "fields": {**fields, "id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}},
    }


@strict
class CtxMultiTaskConfig(CtxConfig):
    """Configuration of an encoder, and the changes of each task.

    Args: the arguments of `CtxConfig`, and
        encoder: Configuration of the encoder's family, or its dictionary; a small BERT by default.
        tasks: Name of a task -> "auto_class" of its head, "fields" of the encoder's configuration that differ for it,
            and "loss_weight", the factor of its loss in training; see `task_entry`.
        task_adapters: Name of a task -> names of the bottleneck adapters that are active for it, from the lowest up;
            None without. The adapters are saved in `adapters/`, see `downstream.adapters`.
        projected_attention: "size" and "heads" of projected attention layers for each task, see
            `downstream.multitask.projected_attention`; None without.

    Raises:
        CtxError: A task's name, head or field is invalid, or the encoder belongs to no family.
    """

    model_type = MULTITASK_MODEL_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {"encoder": AutoConfig}

    encoder: Any = None
    tasks: dict[str, Any] | None = None
    task_adapters: dict[str, Any] | None = None
    projected_attention: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder is None:
            self.encoder = CtxBertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2)
        if isinstance(self.encoder, Mapping):
            self.encoder = get_family(str(self.encoder.get("model_type"))).config.from_dict(dict(self.encoder))
        self.tasks = deepcopy(self.tasks or {})
        family = get_family(self.encoder)
        for name, task in self.tasks.items():
            location = f"tasks[{name!r}]"
            check_task_name(name, location)
            if not isinstance(task, Mapping) or set(task) != _KEYS:
                raise CtxError(
                    f"Expected {', '.join(sorted(_KEYS))}, got {task!r}.", location=location, hint="use task_entry."
                )
            if task["auto_class"] not in family.models:
                raise CtxError(
                    f"The family {family.name} has no {task['auto_class']}.",
                    location=location,
                    hint=f"use one of {', '.join(name for name in family.models if 'For' in name)}.",
                )
            if unknown := set(task["fields"]) - {*family.config.__dataclass_fields__}:
                raise CtxError(
                    f"{family.config.__name__} has no field {', '.join(sorted(unknown))}.",
                    location=location,
                    hint="remove it.",
                )
        if unknown := set(self.task_adapters or {}) - set(self.tasks):
            raise CtxError(
                f"task_adapters has no task {', '.join(sorted(unknown))}.",
                location="task_adapters",
                hint=f"use names of tasks: {', '.join(self.tasks) or 'none'}.",
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.encoder, name))
        super().__post_init__(**kwargs)
        self.is_encoder_decoder = self.encoder.is_encoder_decoder

    def head_class(self, task: str) -> Any:
        """The family's class for the head of a task."""
        return get_family(self.encoder).models[self._task(task)["auto_class"]]

    def task_config(self, task: str) -> CtxConfig:
        """Configuration of a task's plain model of the encoder's family; raises CtxError if there is no such task."""
        values = {**self.encoder.to_dict(), **self._task(task)["fields"], "tokenizer_digest": self.tokenizer_digest}
        for name in ("architectures", "auto_map", "_name_or_path"):
            values.pop(name, None)
        config = type(self.encoder).from_dict(values)
        config._attn_implementation = self.encoder._attn_implementation
        return config

    def _task(self, name: str) -> dict[str, Any]:
        tasks = self.tasks or {}
        if name not in tasks:
            raise CtxError(
                f"The model has no task {name!r}.",
                location=self.name_or_path or None,
                hint=f"use one of: {', '.join(tasks) or 'none'}.",
            )
        return tasks[name]

    @property
    def max_sequence_length(self) -> int | None:
        """Maximum input length in tokens; None for no limit."""
        return self.encoder.max_sequence_length

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the encoder."""
        return self.encoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the encoder's hidden states."""
        return self.encoder.hidden_size
