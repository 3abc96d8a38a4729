r"""Fine-tune a model on a task, and compare it with a baseline.

    hf-ctxmodels finetune --model runs/bert --task sequence-classification --train_file train.tsv \
        --validation_file dev.tsv --text_columns sentence --label_column label --output_dir runs/sst2

A list of tasks (--tasks) in place of --task and its files trains one encoder with a head for each (MT-DNN).

Runs as well under `accelerate launch`; --resume goes on where the last checkpoint was saved.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_ctxmodels.compression.low_bits.training import LowBitsArguments
from hf_ctxmodels.core.console import format_next_commands
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import check_output_file
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningMethodArguments
from hf_ctxmodels.downstream.finetuning.configuration import FinetuningConfig
from hf_ctxmodels.downstream.finetuning.finetuning_run import (
    FinetuningArguments,
    FinetuningLoopArguments,
    Learn,
    finetune,
    load_config_and_tokenizer,
    open_model,
)
from hf_ctxmodels.downstream.finetuning.multitask.multitask_run import MultitaskArguments, Start, finetune_tasks, report
from hf_ctxmodels.downstream.tasks import Task, TaskArguments
from hf_ctxmodels.downstream.tasks.normalized_references import CEILING
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.recipe import parse_arguments


def write_predictions(file: str, task: Task[Any], examples: list[Any], predictions: list[Any]) -> None:
    """One JSON object a line: the example, its label and what was predicted."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task.record(*pair), ensure_ascii=False) for pair in zip(examples, predictions, strict=True)]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(metrics: dict[str, float], baseline: dict[str, float], ceiling: dict[str, float]) -> str:
    """The metrics beside what the baseline gets, and what they are at most."""
    most = {name: f"{value:>10.4f}" for name, value in ceiling.items()}
    rows = [f"{'metric':<24}{'model':>10}{'baseline':>10}" + f"{'ceiling':>10}" * bool(most)]
    rows.append(f"{'loss':<24}{metrics['eval_loss']:>10.4f}")
    for name, value in baseline.items():
        rows.append(f"{name:<24}{metrics[f'eval_{name}']:>10.4f}{value:>10.4f}" + most.get(name, ""))
    return "\n".join(rows)


def main() -> None:
    """Fine-tune; print the metrics beside the baseline's."""
    kinds = (FinetuningArguments, TaskArguments, FinetuningLoopArguments, MultitaskArguments)
    arguments, task_arguments, loop_arguments, several, *parts = parse_arguments(
        *kinds, FinetuningMethodArguments, AdapterArguments, LowBitsArguments, description=__doc__
    )
    how = FinetuningConfig(*parts)
    if several.tasks is not None:
        start = start_of(arguments, how)
        report(finetune_tasks(several, task_arguments, loop_arguments, start))
        return
    if several != MultitaskArguments():
        raise CtxError("It belongs to --tasks.", location="--tasks_folder, --only or --keep", hint="give --tasks.")
    run(arguments, task_arguments, loop_arguments, how)


def start_of(arguments: FinetuningArguments, how: FinetuningConfig) -> Start:
    """The start of a run over several tasks, by the flags.

    Raises:
        CtxError: There are flags of a single task.
    """
    files = ("train_file", "validation_file", "unlabelled_file", "predictions_file")
    single = ("task", *files, "train_examples", "language")
    if given := [f"--{name}" for name in single if getattr(arguments, name)]:
        raise CtxError(
            "Several tasks have their files in their list, no files of predictions, and no language for all.",
            location=", ".join(given),
            hint="leave it out, or --tasks.",
        )
    if (
        how.methods.freeze == "embeddings"
        or replace(how, methods=replace(how.methods, freeze=None)) != FinetuningConfig()
    ):
        raise CtxError(
            "Of the methods to fine-tune, several tasks take --freeze encoder alone.",
            location="--tasks with --layer_mix, --thaw, --anchor, --mixout, --reinit_layers, --adapter or bits",
            hint="fine-tune a task by itself from the joint model, by --task_name, with them.",
        )
    where, frozen = arguments.model or str(arguments.family), how.methods.freeze is not None
    return Start(partial(load_config_and_tokenizer, arguments, own=True), partial(open_model, arguments), where, frozen)


def run(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    how: FinetuningConfig | None = None,
    learn: Learn | None = None,
) -> None:
    """`finetune`, and what is written and printed after it."""
    predictions = arguments.predictions_file
    if predictions is not None:
        check_output_file(
            predictions,
            flag="--predictions_file",
            overwrite=loop_arguments.overwrite or loop_arguments.resume,
            inputs=(arguments.train_file, arguments.validation_file, arguments.unlabelled_file),
        )
    found = finetune(arguments, task_arguments, loop_arguments, how, learn)
    if predictions is not None and not found.evaluation.predictions:  # nothing was left to train
        found.evaluation(found.model.eval(), found.accelerator)
    if found.accelerator.is_main_process:
        found.save_summary(arguments)
        if predictions is not None:
            write_predictions(predictions, found.task, found.validation, found.evaluation.predictions)
        print(table(found.result.metrics, found.baseline, found.ceiling))
        if found.ceiling:
            print(CEILING)
        if found.task.baseline_name:
            print(f"baseline: {found.task.baseline_name}")
        output = loop_arguments.output_dir
        print(f"{len(found.training)} training and {len(found.validation)} validation examples")
        print(f"model, tokenizer, log and summary saved in {output}" + (f", {predictions}" if predictions else ""))
        write = [("generate", "--model", output, "--input", "FILE")] if found.task.is_generative else []
        print(format_next_commands(*write, ("push", "--model", output, "--repo_id", "ORGANISATION/NAME")))
