r"""Pretrain a model of any family on raw text.

    hf-ctxmodels pretrain --family bert --config tiny --tokenizer DIR --dataset demo --max_steps 500 \
        --per_device_batch_size 32 --max_length 128 --output_dir DIR

It also runs under `accelerate launch -m`. After an interruption the same command with --resume continues from the last
checkpoint.
"""

from pathlib import Path

from accelerate import PartialState

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, format_next_commands, format_number
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceClassification
from hf_ctxmodels.downstream.text2text.pretraining import PretrainingMixtureArguments
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.arguments import PretrainingLoopArguments
from hf_ctxmodels.training.dry_run import DryRunArguments, estimate_pretraining
from hf_ctxmodels.training.memory_estimate import estimate_memory
from hf_ctxmodels.training.pretraining import (
    PretrainingArguments,
    PretrainingExtensions,
    prepare_pretraining,
    pretrain,
)
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.token_embeddings import EmbeddingTrainingArguments

ESSENTIAL = (
    *("family", "config", "tokenizer", "dataset", "objective", "output_dir"),
    *("max_steps", "per_device_batch_size", "learning_rate", "max_length"),
)


def main() -> None:
    """Pretrain, and print the output files and the losses."""
    arguments, loop_arguments, adapters, embeddings, mixture, estimate = parse_arguments(
        PretrainingArguments,
        PretrainingLoopArguments,
        AdapterArguments,
        EmbeddingTrainingArguments,
        PretrainingMixtureArguments,
        DryRunArguments,
        description=__doc__,
        essential=ESSENTIAL,
    )
    extensions = PretrainingExtensions(
        add_adapter=adapters.apply_for_pretraining if adapters.adapter is not None else None,
        embedding_training=embeddings if embeddings.train_only is not None else None,
        make_mixture=mixture.add_tasks if mixture.mixture is not None else None,
    )
    if estimate.estimate:
        for line in estimate_memory(arguments, loop_arguments):
            print(line)
        return
    if estimate.dry_run:
        for line in estimate_pretraining(prepare_pretraining(arguments, loop_arguments, extensions)):
            PartialState().print(line)
        return
    summary = pretrain(arguments, loop_arguments, extensions)
    if not PartialState().is_main_process:
        return
    output = loop_arguments.output_dir
    tokens = format_number(summary.tokens)
    print(f"{summary.model_class} after {format_count(summary.steps, 'step')} and {tokens} tokens, saved in {output}:")
    show_results(summary, output)
    print(
        format_next_commands(
            finetuning_command(output, summary.model_type),
            ("push", "--model", output, "--repo_id", "ORGANIZATION/NAME"),
        )
    )


def show_results(summary: TrainingSummary, output: str) -> None:
    """Print the files in the output directory, the validation metrics with their baselines and ranges, and warnings."""
    files = sorted(path.name for path in Path(output).iterdir() if not path.name.startswith("."))
    print(f"  {', '.join(files)}")
    for name, value in summary.metrics.items():
        if name.startswith("eval_"):
            baseline = summary.baselines.get(name.removeprefix("eval_"))
            columns = f"{value:>9.4f}  " + ("" if baseline is None else f"baseline {baseline:.4f}")
            print(f"  {name:<30}{columns:<30}{metric_range(name)}")
    summary.print_warnings()


def finetuning_command(model: str, model_type: str) -> tuple[str, ...]:
    """The command that fine-tunes the model in a directory on a task supported by its family."""
    heads = get_family(model_type).models
    task = SequenceClassification if SequenceClassification.auto_class in heads else Seq2Seq
    files = ("--train_file", "FILE", "--validation_file", "FILE", "--output_dir", "DIR")
    return ("finetune", task.name, "--model", model, *files)
