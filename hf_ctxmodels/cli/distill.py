r"""Let a small student learn from a teacher: on raw text, or with --task on a task's examples.

    hf-ctxmodels distill --recipe distilbert --teacher runs/bert --dataset FILE --output_dir runs/student
    hf-ctxmodels distill --recipe bert_pkd --teacher runs/sst2 --model runs/bert --train_file train.tsv \
        --validation_file dev.tsv --text_columns sentence --output_dir runs/sst2-student

The student is a new model (--family, --config), a checkpoint (--model), or made of the teacher's layers
(--student_layers). On raw text the flags are those of `pretrain`, with --task those of `finetune`. The saved model is
the student alone. Runs as well under `accelerate launch`; --resume goes on where the last checkpoint was saved.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from accelerate import PartialState

from hf_ctxmodels.cli import finetune
from hf_ctxmodels.cli.pretrain import finetuning_of, show_results
from hf_ctxmodels.compression.distillation import DistillationSetup, Teacher, parse_losses
from hf_ctxmodels.compression.distillation.arguments import DistillationArguments, select_fields
from hf_ctxmodels.compression.distillation.teacher import check_layers
from hf_ctxmodels.core.console import format_next_commands
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import non_default_fields
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.model_loading import load_family_config
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain, resolve_family
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass(kw_only=True)
class DistillArguments(DistillationArguments, PretrainingArguments, finetune.FinetuningArguments, TaskArguments):
    """Teacher, student and data. --model is a checkpoint of the student to go on from."""

    task: Literal["sequence-classification", "regression", "token-classification"] | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Distill on this task's examples; by default on raw text."}
    )
    dataset: list[str] = field(
        default_factory=list, metadata={"help": "Without --task: raw text, as of `pretrain --dataset`."}
    )
    train_file: str = field(default="", metadata={"help": "With --task: training examples, as of `finetune`."})
    validation_file: str = field(default="", metadata={"help": "With --task: held-out examples in the same form."})

    def __post_init__(self) -> None:
        needed = ("teacher", "train_file", "validation_file") if self.task else ("teacher", "dataset")
        for name in needed:
            if not getattr(self, name):
                raise CtxError(f"--{name} is missing.", location="hf-ctxmodels distill", hint="--help explains it.")
        of_text = {each.name for each in fields(PretrainingArguments)}
        of_task = {each.name for kind in (finetune.FinetuningArguments, TaskArguments) for each in fields(kind)}
        other = of_text - of_task | {"unlabelled_file"} if self.task else of_task - of_text
        if unread := sorted(non_default_fields(self) & other):
            raise CtxError(
                f"--{unread[0]} is not read {'with' if self.task else 'without'} --task.",
                location="hf-ctxmodels distill",
                hint="a student learns from raw text (--dataset), or on a task's examples (--task, --train_file); soft "
                "targets need none of their labels.",
            )


def main() -> None:
    """Parse the command line and distill."""
    arguments, loop_arguments = parse_arguments(DistillArguments, LoopArguments, description=__doc__)
    distill(arguments, loop_arguments)


def distill(arguments: DistillArguments, loop_arguments: LoopArguments) -> None:
    """Train the student, save it, and say how good it is.

    Raises:
        CtxError: Teacher, student, terms, data and flags do not fit.
    """
    terms = parse_losses(arguments.terms, arguments.term_options)
    split_words = arguments.task is not None and TASKS[arguments.task].split_words
    teacher = Teacher.open(arguments.teacher, split_words=split_words)
    check_tokenizer_matches_model(
        teacher.tokenizer, teacher.config, arguments.max_length, location=f"--teacher {arguments.teacher}"
    )
    complete(arguments, teacher)
    lesson = DistillationSetup(teacher, terms, arguments.model, arguments.student_layers)
    if arguments.task is not None:
        task_flags = select_fields(finetune.FinetuningArguments, arguments), select_fields(TaskArguments, arguments)
        finetune.run(*task_flags, loop_arguments, learn=lesson.prepare_finetuning)
        return
    summary = pretrain(select_fields(PretrainingArguments, arguments), loop_arguments, learn=lesson.prepare_pretraining)
    if PartialState().is_main_process:
        output = loop_arguments.output_dir
        print(f"{summary.model_class} of {summary.parameters:,} parameters after {summary.steps:,} steps, in {output}:")
        show_results(summary, output)
        print(format_next_commands(finetuning_of(output, summary.model_type)))


def complete(arguments: DistillArguments, teacher: Teacher) -> None:
    """Fill in what follows from the teacher: the student's source and depth with `student_layers`, the tokenizer of a
    new student, and on raw text its family and objective.

    Raises:
        CtxError: A layer does not exist, or the student's family has no masked language model.
    """
    if arguments.student_layers:
        arguments.model = arguments.model or arguments.teacher
        source = teacher.config if arguments.model == arguments.teacher else load_family_config(arguments.model)
        check_layers(arguments.student_layers, source)
        arguments.config_options = [*arguments.config_options, f"num_hidden_layers={len(arguments.student_layers)}"]
    if arguments.tokenizer is None and (arguments.model is None or arguments.task is None):
        arguments.tokenizer = arguments.teacher
    if arguments.task is not None:
        return
    if arguments.family is None and arguments.model in (None, arguments.teacher):
        arguments.family = get_family(teacher.config).name
    family = resolve_family(select_fields(PretrainingArguments, arguments))
    masked = [name for name, kind in family.objectives.items() if kind.auto_class == "AutoModelForMaskedLM"]
    if arguments.objective is None and not masked:
        raise CtxError(
            f"The family {family.name} has no masked language model, which raw text is learned with.",
            location=f"--family {family.name}",
            hint="distill on a task with --task, or use another family.",
        )
    arguments.objective = arguments.objective or masked[0]
