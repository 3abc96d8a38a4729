"""`hf-ctxmodels finetune TASK`: fine-tune a model on a task."""

import json
from dataclasses import replace
from itertools import chain
from typing import Any

from hf_ctxmodels.compression.finetuning_flags import finetuning_sections
from hf_ctxmodels.core.command_line import Section, parse_arguments
from hf_ctxmodels.core.console import format_next_commands
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.downstream.finetuning.arguments import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningMethods,
    StartingModelArguments,
)
from hf_ctxmodels.downstream.finetuning.finetuning_run import MakeTrainingSetup, finetune
from hf_ctxmodels.downstream.multitask.task_list import KINDS
from hf_ctxmodels.downstream.multitask.training import MultitaskArguments, finetune_tasks
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.base import COLUMN_FLAGS
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.downstream.tasks.text_metrics import UPPER_BOUND_NOTE
from hf_ctxmodels.downstream.tasks.tfidf import TFIDF_NOTE
from hf_ctxmodels.downstream.text2text.text_to_text import TextToText
from hf_ctxmodels.downstream.text2text.training import TextToTextArguments, finetune_text2text
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels_cli import FINETUNING_TASKS

_PREDICTION_FLAGS = (*COLUMN_FLAGS, "head_column", "target_language")
ESSENTIAL = (
    *("model", "train_file", "validation_file", "text_columns", "label_column", "output_dir"),
    *("num_train_epochs", "per_device_batch_size", "learning_rate", "max_length"),
)
_DESCRIPTION = """{summary} {details}

    hf-ctxmodels finetune {task} --model runs/bert {data} --output_dir runs/{task}

It also runs under `accelerate launch -m`. After an interruption the same command with --resume continues from the last
checkpoint."""


def flag_sections(task: str) -> tuple[Section, ...]:
    """The sections of flags of a task."""
    model = (StartingModelArguments, ("model", "family", "config_options"))
    if task == "multitask":
        columns = {name for task_name in KINDS for name in TASKS[task_name].argument_names}
        return MultitaskArguments, model, (TaskArguments, columns), FinetuningLoopArguments
    if task == "text2text":
        return TextToTextArguments, model, (TaskArguments, TextToText.argument_names), FinetuningLoopArguments
    return finetuning_sections(TASKS[task])


def main(task: str) -> None:
    """Fine-tune on a task, and print the metrics of the model and of the baseline."""
    is_multitask = task == "multitask"
    details = "The metrics are compared with a baseline that ignores the input, and for texts with TF-IDF."
    data = "--train_file train.tsv --validation_file dev.tsv"
    if is_multitask:
        details = "The task list is a YAML file or the name of a packaged list."
        data = "--tasks mtdnn --tasks_folder glue"
    elif task == "text2text":
        details = "The tasks are a YAML file or the name of a packaged file; the score table is in scores.md."
        data = "--tasks tasks.yaml --tasks_folder data"
    description = _DESCRIPTION.format(task=task, summary=FINETUNING_TASKS[task], details=details, data=data)
    arguments, *sections = parse_arguments(*flag_sections(task), description=description, essential=ESSENTIAL)
    if is_multitask:
        finetune_tasks(arguments, *sections)
    elif task == "text2text":
        finetune_text2text(arguments, *sections)
    else:
        task_arguments, loop_arguments, *options = sections
        run(replace(arguments, task=task), task_arguments, loop_arguments, FinetuningMethods(*options))


def run(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    methods: FinetuningMethods | None = None,
    make_setup: MakeTrainingSetup | None = None,
) -> None:
    """Call `finetune`, write the summary and the predictions, and print the metrics."""
    file = arguments.predictions_file
    if file is not None:
        check_output_file(
            file,
            flag="--predictions_file",
            overwrite=loop_arguments.overwrite or bool(loop_arguments.resume),
            inputs=(
                *arguments.train_file,
                arguments.validation_file,
                arguments.unlabeled_file,
            ),
        )
    tuned = finetune(arguments, task_arguments, loop_arguments, methods, make_setup)
    if file is not None and not tuned.evaluation.predictions:  # a resumed run that was already finished
        tuned.evaluation(tuned.model.eval(), tuned.accelerator)
    if not tuned.accelerator.is_main_process:
        return
    summary = tuned.save_summary(arguments)
    if file is not None:
        examples = zip(tuned.validation, tuned.evaluation.predictions, strict=True)
        records = [json.dumps(tuned.task.record(*example), ensure_ascii=False) for example in examples]
        write_text_file(file, "\n".join(records) + "\n")

    metrics, bounds, learned = summary.metrics, tuned.upper_bounds, tuned.learned_baseline
    columns = {"model": {name: metrics[f"eval_{name}"] for name in ("loss", *tuned.baseline)}}
    columns |= {"baseline": tuned.baseline, "TF-IDF": learned, "upper bound": bounds}
    columns = {title: values for title, values in columns.items() if values}
    print(f"{'metric':<24}" + "".join(f"{title:>13}" for title in columns) + "  range")
    for name in columns["model"]:
        cells = (f"{values[name]:>13.4f}" if name in values else " " * 13 for values in columns.values())
        print(f"{name:<24}{''.join(cells)}  {metric_range(name, tuned.task.is_percentage)}")
    if bounds:
        print(UPPER_BOUND_NOTE)
    if learned:
        print(TFIDF_NOTE)
    if tuned.task.baseline_name:
        print(f"baseline: {tuned.task.baseline_name}")
    for name, shares in summary.layer_shares.items():
        print(f"{name}, share of each layer: {' '.join(f'{share:.3f}' for share in shares)}")
    output = loop_arguments.output_dir
    print(f"{len(tuned.training):,} training and {len(tuned.validation):,} validation examples")
    print(f"model, tokenizer, log and summary saved in {output}" + (f", {file}" if file else ""))
    summary.print_warnings()
    use = prediction_command(output, task_arguments)
    print(format_next_commands(use, ("push", "--model", output, "--repo_id", "ORGANIZATION/NAME")))


def prediction_command(model: str, task_arguments: TaskArguments) -> list[Any]:
    """The command that predicts with the model, with the columns and languages of the task that are not saved."""
    flags = {name: getattr(task_arguments, name) for name in _PREDICTION_FLAGS}
    saved = task_arguments.saved_columns()
    set_flags = [(f"--{name}", value) for name, value in flags.items() if value and name not in saved]
    return ["predict", "--model", model, "--input", "FILE", *chain.from_iterable(set_flags)]
