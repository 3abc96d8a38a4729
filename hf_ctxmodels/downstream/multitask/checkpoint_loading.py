"""Loading of the model to fine-tune, also from a task of a multi-task model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.training.model_loading import (
    change_config,
    load_config,
    load_family_config,
    load_model,
    verify_weights,
)


def open_config(
    source: str, changes: Mapping[str, Any], task_name: str | None = None, *, require_family: bool = False
) -> PreTrainedConfig:
    """The configuration of a checkpoint; of a multi-task checkpoint, the configuration of a task's plain model.

    Args:
        source: Directory or Hub id.
        changes: Fields to replace.
        task_name: Task of a multi-task checkpoint, otherwise None.
        require_family: Open a checkpoint of transformers with the corresponding family.

    Raises:
        CtxError: As `load_config`; or a multi-task checkpoint needs a task, or has no such task.
    """
    config = load_config(source)
    if isinstance(config, CtxMultiTaskConfig):
        if task_name is None:
            raise CtxError(
                f"The model has several tasks: {', '.join(config.tasks or {})}.",
                location=source,
                hint="choose a task by --task_name.",
            )
        config = config.task_config(task_name)
    elif task_name is not None:
        raise CtxError(
            "The model was not trained on several tasks.",
            location=f"--model {source} --task_name {task_name}",
            hint="remove --task_name, or use a directory written by `finetune multitask`.",
        )
    elif require_family:
        config = load_family_config(source)
    return change_config(config, changes, source)


def load_initial_model(
    source: str, auto_class: str, config: PreTrainedConfig, task_name: str | None = None
) -> PreTrainedModel:
    """`load_model` of a checkpoint, or of a task's weights in a multi-task checkpoint.

    Raises:
        CtxError: As `load_model`.
    """
    if task_name is None:
        return load_model(source, auto_class, config)
    verify_weights(Path(source))
    weights = load_pretrained(CtxMultiTaskModel, source, "the multi-task model").task_weights(task_name)
    return load_model(source, auto_class, config, weights=weights)
