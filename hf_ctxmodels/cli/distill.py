"""`hf-ctxmodels distill text` and `distill TASK`: train a student on the outputs of a teacher."""

from dataclasses import dataclass, replace

from accelerate import PartialState

from hf_ctxmodels.cli import finetune
from hf_ctxmodels.cli.pretrain import finetuning_command, show_results
from hf_ctxmodels.compression.distillation import DistillationSetup, Teacher, parse_losses
from hf_ctxmodels.compression.distillation.distillation_setup import DistillationArguments
from hf_ctxmodels.core.command_line import Section, parse_arguments
from hf_ctxmodels.core.console import format_count, format_next_commands, format_number
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import select_fields
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningArguments, FinetuningLoopArguments
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import check_run_directory
from hf_ctxmodels.training.model_loading import load_family_config
from hf_ctxmodels.training.pretraining import PretrainingArguments, PretrainingExtensions, pretrain, resolve_family

ESSENTIAL = (
    *("teacher", "losses", "student_layers", "model", "family", "dataset", "train_file", "validation_file"),
    *("output_dir", "num_train_epochs", "per_device_batch_size", "learning_rate", "max_length"),
)
_STUDENT = """
The student is a new model (--family), a checkpoint (--model), or initialized from the teacher's layers
(--student_layers). Only the student is saved. It also runs under `accelerate launch -m`; --resume continues from the
last checkpoint."""
_TEXT = r"""Distill a masked language model on raw text.

    hf-ctxmodels distill text --recipe distilbert --teacher runs/bert --dataset FILE --output_dir runs/student
"""
_TASK = r"""Distill a fine-tuned model on the examples of a task.

    hf-ctxmodels distill {task} --recipe bert_pkd --teacher runs/sst2 --model runs/bert \
        --train_file train.tsv --validation_file dev.tsv --output_dir runs/student
"""


@dataclass(kw_only=True)
class TextDistillationArguments(DistillationArguments, PretrainingArguments):
    """Teacher, student and data."""


@dataclass(kw_only=True)
class TaskDistillationArguments(DistillationArguments, FinetuningArguments):
    """Teacher, student and data."""


def flag_sections(task: str) -> tuple[Section, ...]:
    """The sections of flags of `distill text` or `distill TASK`."""
    if task == "text":
        names = set(TextDistillationArguments.__dataclass_fields__) - {
            "news_articles",
            "control_codes",
            "control_column",
        }
        return (TextDistillationArguments, names), LoopArguments
    names = set(TaskDistillationArguments.__dataclass_fields__) - {"unlabeled_file"}
    return (TaskDistillationArguments, names), (TaskArguments, TASKS[task].argument_names), FinetuningLoopArguments


def main(task: str) -> None:
    """Train the student on raw text or on the examples of a task, save it, and print its metrics."""
    description = (_TEXT if task == "text" else _TASK.format(task=task)) + _STUDENT
    arguments, *other_arguments = parse_arguments(*flag_sections(task), description=description, essential=ESSENTIAL)
    check_run_directory(other_arguments[-1], arguments.tokenizer_source or arguments.teacher)
    if task != "text":
        arguments = replace(arguments, task=task)
        task_arguments, loop = other_arguments
        setup = _prepare(arguments, TASKS[task].split_words, task_arguments.max_length)
        if arguments.family is not None and arguments.family.tokenizer is None:
            arguments.family = replace(arguments.family, tokenizer=arguments.teacher)
        student = select_fields(FinetuningArguments, arguments)
        finetune.run(student, task_arguments, loop, make_setup=setup.prepare_finetuning)
        return

    (loop,) = other_arguments
    setup = _prepare(arguments, False, arguments.max_length)
    arguments.tokenizer = arguments.tokenizer or arguments.teacher
    if arguments.family is None and arguments.model in (None, arguments.teacher):
        arguments.family = get_family(setup.teacher.config).name
    family = resolve_family(select_fields(PretrainingArguments, arguments))
    if arguments.objective is None:
        masked_lm = (
            name for name, objective in family.objectives.items() if objective.auto_class == "AutoModelForMaskedLM"
        )
        arguments.objective = next(masked_lm, None)
    if arguments.objective is None:
        raise CtxError(
            f"The family {family.name} has no masked language model to distill on raw text.",
            location=f"--family {family.name}",
            hint="distill on a task, or use another family.",
        )
    extensions = PretrainingExtensions(make_setup=setup.prepare_pretraining)
    summary = pretrain(select_fields(PretrainingArguments, arguments), loop, extensions)
    if PartialState().is_main_process:
        output = loop.output_dir
        parameters = format_number(summary.parameters)
        steps = format_count(summary.steps, "step")
        print(f"{summary.model_class} of {parameters} parameters after {steps}, in {output}:")
        show_results(summary, output)
        print(format_next_commands(finetuning_command(output, summary.model_type)))


def _prepare(
    arguments: TextDistillationArguments | TaskDistillationArguments, split_words: bool, max_length: int
) -> DistillationSetup:
    """Open the teacher, and set the initial weights and depth of the student from `--student_layers`, which modifies
    `model` and `config_options`; raises CtxError if the teacher has too few positions, or lacks a layer."""
    losses = parse_losses(arguments.losses)
    teacher = Teacher.open(arguments.teacher, split_words=split_words)
    location = f"--teacher {arguments.teacher}"
    check_tokenizer_matches_model(teacher.tokenizer, teacher.config, max_length, location=location)
    layers = arguments.student_layers
    if layers:
        arguments.model = arguments.model or arguments.teacher
        source = teacher.config if arguments.model == arguments.teacher else load_family_config(arguments.model)
        num_layers = getattr(source, "num_hidden_layers", 0)
        if missing := [layer for layer in layers if not 0 <= layer < num_layers]:
            raise CtxError(
                f"There is no layer {missing[0]}: the model has {num_layers} layers, counted from 0.",
                location=f"--student_layers {' '.join(map(str, layers))}",
                hint=f"use layers from 0 to {num_layers - 1}.",
            )
        arguments.config_options = [*arguments.config_options, f"num_hidden_layers={len(layers)}"]
    return DistillationSetup(teacher, losses, arguments.model, layers)
