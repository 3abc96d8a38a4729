"""`hf-ctxmodels finetune TASK`: fine-tune a model on a task."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_ctxmodels.compression.low_bits.training import LowBitsArguments
from hf_ctxmodels.core.console import format_next_commands
from hf_ctxmodels.core.output_files import check_output_file
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.finetuning.arguments import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningMethodArguments,
    StartingModelArguments,
)
from hf_ctxmodels.downstream.finetuning.configuration import FinetuningConfig
from hf_ctxmodels.downstream.finetuning.finetuning_run import (
    MakeTrainingSetup,
    finetune,
    load_config_and_tokenizer,
    open_model,
)
from hf_ctxmodels.downstream.finetuning.multitask.multitask_run import (
    MultitaskArguments,
    StartingModel,
    finetune_tasks,
    report,
)
from hf_ctxmodels.downstream.tasks import TASKS, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.normalized_references import UPPER_BOUND_NOTE
from hf_ctxmodels.downstream.tasks.task_list import KINDS
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.recipe import Section, parse_arguments
from hf_ctxmodels_cli import FINETUNING_TASKS

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
    if task == "multitask":
        columns = {name for task_name in KINDS for name in TASKS[task_name].argument_names}
        model = (StartingModelArguments, ("model", "family", "config_options"))
        return MultitaskArguments, model, (TaskArguments, columns), FinetuningLoopArguments
    task_class = TASKS[task]
    names = set(FinetuningArguments.__dataclass_fields__)
    if task_class.read_unlabelled is Task.read_unlabelled:
        names -= {"unlabelled_file"}
    return (
        (FinetuningArguments, names),
        (TaskArguments, task_class.argument_names),
        FinetuningLoopArguments,
        FinetuningMethodArguments,
        AdapterArguments,
        LowBitsArguments,
    )


def parse(task: str) -> tuple[Any, ...]:
    """Parse the command line of `hf-ctxmodels finetune TASK`."""
    if task == "multitask":
        details = "The task list is a YAML file or the name of a packaged list."
        data = "--tasks mtdnn --tasks_folder glue"
    else:
        details = "The metrics are compared with a baseline that ignores the input."
        data = "--train_file train.tsv --validation_file dev.tsv"
    description = _DESCRIPTION.format(task=task, summary=FINETUNING_TASKS[task], details=details, data=data)
    return parse_arguments(*flag_sections(task), description=description, essential=ESSENTIAL)


def main(task: str) -> None:
    """Fine-tune on a task, and print the metrics of the model and of the baseline."""
    if task == "multitask":
        run_multitask(*parse(task))
        return
    arguments, task_arguments, loop_arguments, *methods = parse(task)
    run(replace(arguments, task=task), task_arguments, loop_arguments, FinetuningConfig(*methods))


def run_multitask(
    arguments: MultitaskArguments, model: StartingModelArguments, defaults: TaskArguments, loop: LoopArguments
) -> None:
    """Fine-tune on a task list, and print the metrics of each task and its baseline."""
    start = StartingModel(
        partial(load_config_and_tokenizer, model, require_family=True),
        partial(open_model, model),
        model.model or "--family",
        arguments.freeze is not None,
    )
    report(finetune_tasks(arguments, defaults, loop, start))


def write_predictions(file: str, task: Task[Any], examples: list[Any], predictions: list[Any]) -> None:
    """Write one JSON object per example, with its label and prediction."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task.record(*pair), ensure_ascii=False) for pair in zip(examples, predictions, strict=True)]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(metrics: dict[str, float], baseline: dict[str, float], upper_bounds: dict[str, float]) -> str:
    """Format the metrics of the model and the baseline, and the upper bounds of the metrics."""
    bounds = {name: f"{value:>13.4f}" for name, value in upper_bounds.items()}
    lines = [f"{'metric':<24}{'model':>10}{'baseline':>10}" + f"{'upper bound':>13}" * bool(bounds)]
    lines.append(f"{'loss':<24}{metrics['eval_loss']:>10.4f}")
    for name, value in baseline.items():
        lines.append(f"{name:<24}{metrics[f'eval_{name}']:>10.4f}{value:>10.4f}" + bounds.get(name, ""))
    return "\n".join(lines)


def run(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    config: FinetuningConfig | None = None,
    make_setup: MakeTrainingSetup | None = None,
) -> None:
    """Call `finetune`, write the summary and the predictions, and print the metrics."""
    file = arguments.predictions_file
    if file is not None:
        check_output_file(
            file,
            flag="--predictions_file",
            overwrite=loop_arguments.overwrite or loop_arguments.resume,
            inputs=(arguments.train_file, arguments.validation_file, arguments.unlabelled_file),
        )
    tuned = finetune(arguments, task_arguments, loop_arguments, config, make_setup)
    if file is not None and not tuned.evaluation.predictions:  # a resumed run that was already finished
        tuned.evaluation(tuned.model.eval(), tuned.accelerator)
    if not tuned.accelerator.is_main_process:
        return
    tuned.save_summary(arguments)
    if file is not None:
        write_predictions(file, tuned.task, tuned.validation, tuned.evaluation.predictions)
    print(table(tuned.result.metrics, tuned.baseline, tuned.upper_bounds))
    if tuned.upper_bounds:
        print(UPPER_BOUND_NOTE)
    if tuned.task.baseline_name:
        print(f"baseline: {tuned.task.baseline_name}")
    output = loop_arguments.output_dir
    print(f"{len(tuned.training)} training and {len(tuned.validation)} validation examples")
    print(f"model, tokenizer, log and summary saved in {output}" + (f", {file}" if file else ""))
    generation = [("generate", "--model", output, "--input", "FILE")] if tuned.task.is_generative else []
    print(format_next_commands(*generation, ("push", "--model", output, "--repo_id", "ORGANISATION/NAME")))
