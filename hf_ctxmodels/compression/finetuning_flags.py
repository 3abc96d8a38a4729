"""The flags of `finetune TASK`, with the flags of training in low-bit weights."""

from typing import Any

from hf_ctxmodels.compression.low_bits.training import LowBitsArguments
from hf_ctxmodels.core.command_line import Section
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.finetuning.arguments import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningMethodArguments,
)
from hf_ctxmodels.downstream.tasks import Task, TaskArguments


def finetuning_sections(task: type[Task[Any]]) -> tuple[Section, ...]:
    """The sections of flags of a task that is trained alone."""
    names = set(FinetuningArguments.__dataclass_fields__)
    if not task.has_unlabeled_loss:
        names -= {"unlabeled_file"}
    if task.auto_class != "AutoModelForSeq2SeqLM":
        names -= {"decoder"}
    return (
        (FinetuningArguments, names),
        (TaskArguments, task.argument_names),
        FinetuningLoopArguments,
        FinetuningMethodArguments,
        AdapterArguments,
        LowBitsArguments,
    )
