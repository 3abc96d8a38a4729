"""The identity of a run: on resume, all flags and fields are compared except those that do not change the weights."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flat_options
from hf_ctxmodels.data.document_sources import describe_content
from hf_ctxmodels.training.arguments import ConstantOptions, LoopArguments, NTASGDOptions

FLAGS_THAT_MAY_CHANGE = (
    *("output_dir", "resume", "overwrite", "logging_steps", "report_to"),
    *("save_steps", "save_total_limit", "eval_steps", "dataloader_workers"),
)
"""Flags of the loop that do not change the weights."""

# Flags that are compared through derived values: lengths in epochs and in steps may be equal.
_DERIVED = ("max_steps", "num_train_epochs", "per_device_batch_size", "mixed_precision", "warmup_steps")
# Fields of the configuration that do not change the model.
_UNCOMPARED_CONFIG_FIELDS = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    "return_logits_with_labels",
)


def loop_identity(arguments: LoopArguments, accelerator: Accelerator, total_steps: int) -> dict[str, Any]:
    """The loop's flags that determine the weights.

    The number of steps may change if the learning rate does not depend on it: a run with a constant rate can be
    extended. The number of processes may change if the global batch size does not, and so may the kind of parallelism,
    except that DeepSpeed stores the optimizer state in its own format.
    """
    excluded = (*FLAGS_THAT_MAY_CHANGE, *_DERIVED)
    flags = {name: value for name, value in flat_options(arguments).items() if name not in excluded}
    if isinstance(arguments.optimizer, NTASGDOptions):  # averaging starts at an evaluation
        flags["eval_steps"] = arguments.eval_steps
    return {
        **flags,
        "warmup_steps": arguments.warmup(total_steps),
        "total_steps": None if isinstance(arguments.lr_scheduler, ConstantOptions) else total_steps,
        "global_micro_batch": arguments.per_device_batch_size * accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "deepspeed": accelerator.distributed_type == DistributedType.DEEPSPEED,
    }


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The model's class, the precision of its weights and its configuration, which contains the tokenizer's digest."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return {
        "model_class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{f"config.{name}": value for name, value in fields.items() if name not in _UNCOMPARED_CONFIG_FIELDS},
    }


def flags_identity(arguments: Any, may_change: Iterable[str], files: Iterable[str] = ()) -> dict[str, Any]:
    """A command's flags that determine the weights.

    Args:
        arguments: A dataclass of flags.
        may_change: Fields that do not change the weights, or that are compared through derived values.
        files: Fields that name data files, which are compared by content: they may be moved.
    """
    identity, ignored = {}, set(may_change)
    for name, value in flat_options(arguments).items():
        if name in files and value:
            value = [describe_content(file) for file in value] if isinstance(value, list) else describe_content(value)
        if name not in ignored and name.partition(".")[0] not in ignored:
            identity[name] = value
    return identity


def check_identity(checkpoint: Path, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise CtxError if the identity of a run differs from the identity in the checkpoint that it resumes."""
    absent = object()
    differing = [
        f"{name} is {current.get(name)}, was {saved.get(name)}"
        for name in sorted({*current, *saved})
        if current.get(name, absent) != saved.get(name, absent)
    ]
    if not differing:
        return
    raise CtxError(
        f"The checkpoint belongs to another run: {'; '.join(differing)}.",
        location=str(checkpoint),
        hint="resume with the values of that run, or use another --output_dir; to start a new run from these "
        f"weights, pass them as --model. Only {', '.join(FLAGS_THAT_MAY_CHANGE)}, the location of files, and the "
        "number of steps at a constant learning rate may change.",
    )
