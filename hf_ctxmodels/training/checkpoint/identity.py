"""What makes two starts one run: every flag and field but those that are known not to matter is compared on resume."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.document_sources import describe_content
from hf_ctxmodels.training.arguments import LoopArguments

FLAGS_THAT_MAY_CHANGE = (
    *("output_dir", "resume", "overwrite", "logging_steps", "report_to"),
    *("save_steps", "save_total_limit", "eval_steps", "dataloader_workers"),
)
"""Flags of the loop that change no weight."""

# Flags that are compared by what follows from them: a length in epochs and one in steps may be the same.
_DERIVED = ("max_steps", "num_train_epochs", "per_device_batch_size", "mixed_precision", "warmup_steps")
# Of the configuration: where it was read from, by what, and what a forward pass returns.
_NOT_THE_MODEL = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    "return_logits_with_labels",
)


def loop_identity(arguments: LoopArguments, accelerator: Accelerator, total_steps: int) -> dict[str, Any]:
    """What of the loop's flags decides the weights.

    The length may change where the learning rate does not depend on it: at a constant rate a run can be made longer.
    The number of processes may change with the batch of each, and so may the way they share the work, except that
    DeepSpeed keeps the moments in files of its own.
    """
    flags = {
        name: value for name, value in asdict(arguments).items() if name not in (*FLAGS_THAT_MAY_CHANGE, *_DERIVED)
    }
    if arguments.optimizer == "nt-asgd":  # which averages from an evaluation on
        flags["eval_steps"] = arguments.eval_steps
    return {
        **flags,
        "unfreeze_steps": arguments.unfreezing(total_steps),
        "warmup_steps": arguments.warmup(total_steps),
        "total_steps": None if arguments.lr_scheduler == "constant" else total_steps,
        "global_micro_batch": arguments.per_device_batch_size * accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "deepspeed": accelerator.distributed_type == DistributedType.DEEPSPEED,
    }


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The model's class, the precision of its weights and every field of its configuration, the tokenizer's digest one
    of them."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return {
        "model_class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{f"config.{name}": value for name, value in fields.items() if name not in _NOT_THE_MODEL},
    }


def flags_identity(arguments: Any, may_change: Iterable[str], files: Iterable[str] = ()) -> dict[str, Any]:
    """What of a script's flags decides the weights: all that are not named.

    Args:
        arguments: A dataclass of flags.
        may_change: Its fields that do not matter, or that are compared elsewhere by what follows from them.
        files: Its fields that name data: they may lie elsewhere, but must hold the same.
    """
    left_out, found = set(may_change), {}
    for name, value in asdict(arguments).items():
        if name in files and value:
            value = [describe_content(each) for each in value] if isinstance(value, list) else describe_content(value)
        if name not in left_out:
            found[name] = value
    return found


def check_identity(checkpoint: Path, now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Hold a start against the run that it resumes.

    Raises:
        CtxError: They differ.
    """
    absent = object()
    differing = [
        f"{name} is {now.get(name)}, was {saved.get(name)}"
        for name in sorted({*now, *saved})
        if now.get(name, absent) != saved.get(name, absent)
    ]
    if not differing:
        return
    raise CtxError(
        f"The checkpoint belongs to another run: {'; '.join(differing)}.",
        location=str(checkpoint),
        hint="resume with the values of that run, or give another --output_dir; to start a new run from these "
        f"weights, give them as --model. What may change is {', '.join(FLAGS_THAT_MAY_CHANGE)} and where files lie; and the "
        "length, at a constant rate.",
    )
