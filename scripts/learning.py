r"""Pretrain a small model of a family, fine-tune it and a randomly initialized one, and compare both with baselines.

    python scripts/learning.py --family bert --dataset 'DATA/corpus/[!t]*.txt.gz' \
        --train_file DATA/glue_like/SST-2/train.tsv.gz --dev_file DATA/glue_like/SST-2/dev.tsv \
        --test_file DATA/glue_like/SST-2/test.tsv --text_column sentence --output_dir runs/bert

Each stage is a command of the package and is printed. The learning rate of fine-tuning is chosen on the dev file,
separately for pretrained and random weights; the test file is evaluated once, with the chosen rate. Writes learning.md
(metrics with baselines and targets, for a model card), learning.json and learning.png to the output directory.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cli_runner import run_command
from benchmarks.learning_report import (
    Criterion,
    TransferResult,
    evaluate_pretraining,
    finetuning_recipe,
    learning_recipes,
    report,
    save_json,
    save_random_model,
    transfer_criteria,
)

from hf_ctxmodels.core.command_line import packaged_folder, parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_directory
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary


@dataclass
class LearningArguments:
    """Arguments of the learning experiment."""

    family: str = field(metadata={"help": "Model family.", "choices": list(FAMILIES)})
    output_dir: str = field(metadata={"help": "Output directory."})
    overwrite: bool = flag(False, "Delete the output of an earlier run.")
    pretraining: list[str] = flag(
        (), "Recipes of pretrain, each continuing from the previous one; by default <family>_learning*."
    )
    finetuning: str | None = flag(
        None, "Recipe of finetune; by default <family>_polarity, otherwise polarity_learning."
    )
    dataset: list[str] = flag(("demo",), "Documents for pretraining, as in pretrain.")
    train_file: str = flag("demo", "Labeled sentences for fine-tuning, as in finetune.")
    dev_file: str = flag("demo", "Labeled sentences for the choice of the learning rate.")
    test_file: str = flag("demo", "Labeled sentences for the test accuracy.")
    text_column: str = flag("text", "Text column of the labeled sentences.")
    validation_fraction: float = flag(
        0.02, "Fraction of the documents held out from tokenizer training and pretraining."
    )
    vocab_size: int = flag(8000, "Vocabulary size of the tokenizer.")
    learning_rates: list[float] = flag((5e-4, 1e-3, 2e-3), "Learning rates of fine-tuning to choose from.")
    few_labels: int = flag(500, "Number of labeled sentences of a few-label comparison; 0 disables it.")
    few_epochs: int = flag(20, "Epochs of the few-label comparison.")
    seeds: int = flag(3, "Number of fine-tuning runs per initialization, with seeds 0, 1, ...")
    max_steps: int | None = flag(None, "Pretraining steps of each recipe; by default as in the recipe.")


def pretrain(arguments: LearningArguments, output: Path) -> tuple[list[str], list[str]]:
    """Train a tokenizer and pretrain; returns the commands, and the flags of the last one."""
    data = ("--dataset", *arguments.dataset, "--validation_fraction", arguments.validation_fraction)
    packaged = learning_recipes(packaged_folder("recipes"), arguments.family)
    recipes = arguments.pretraining or [path.stem for path in packaged]
    family = ("--family", arguments.family)
    steps = () if arguments.max_steps is None else ("--max_steps", arguments.max_steps)
    tokenizer, vocabulary = output / "tokenizer", ("--vocab_size", arguments.vocab_size)
    commands = [run_command("data", "tokenizer", *family, *vocabulary, *data, "--output_dir", tokenizer)]
    start: tuple = family
    for number, recipe in enumerate(recipes, start=1):
        model = output / ("pretrained" if number == len(recipes) else f"stage-{number}")
        flags = ("--recipe", recipe, *start, "--tokenizer", tokenizer, *data, *steps, "--output_dir", model)
        commands.append(run_command("pretrain", *flags))
        start = ("--model", model)
    return commands, [str(flag) for flag in flags]


def finetune(arguments: LearningArguments, output: Path, few_labels: bool) -> tuple[list[Criterion], list[str]]:
    """Fine-tune from pretrained and from random weights; returns the criteria and the commands."""
    commands: list[str] = []
    size = ("--train_examples", arguments.few_labels, "--num_train_epochs", arguments.few_epochs) if few_labels else ()
    recipe = arguments.finetuning or finetuning_recipe(packaged_folder("recipes"), arguments.family).stem
    files = {"dev": arguments.dev_file, "test": arguments.test_file}

    def finetuned_accuracy(model: Path, split: str, rate: float, seed: int) -> float:
        result = output / "finetuned" / f"{model.name}-{split}-{'few' if few_labels else 'all'}-{rate:g}-{seed}"
        command = run_command(
            "finetune",
            "sequence-classification",
            *("--recipe", recipe, "--model", model, "--learning_rate", rate, "--seed", seed),
            *("--train_file", arguments.train_file, *size, "--validation_file", files[split]),
            *("--text_columns", arguments.text_column, "--output_dir", result),
        )
        commands.append(command)
        return TrainingSummary.load(result).metrics["eval_accuracy"]

    results = []
    pretrained = [output / "pretrained"] * arguments.seeds
    for models in (pretrained, [output / f"random-{seed}" for seed in range(arguments.seeds)]):
        dev_accuracies = {rate: finetuned_accuracy(models[0], "dev", rate, 0) for rate in arguments.learning_rates}
        rate = max(dev_accuracies, key=lambda rate: dev_accuracies[rate])
        test_accuracies = [finetuned_accuracy(model, "test", rate, seed) for seed, model in enumerate(models)]
        results.append(TransferResult(rate, dev_accuracies, test_accuracies))
    task = "demo" if arguments.train_file == "demo" else Path(arguments.train_file).parent.name
    return transfer_criteria(f"{task}, {arguments.few_labels if few_labels else 'all'} labels,", *results), commands


def main() -> None:
    """Run all stages; write and print the table."""
    (arguments,) = parse_arguments(LearningArguments, description=__doc__)
    if arguments.seeds < 1 or not arguments.learning_rates:
        location = f"--seeds {arguments.seeds} --learning_rates {' '.join(map(str, arguments.learning_rates))}"
        raise CtxError(
            "Fine-tuning needs at least one seed and one learning rate.",
            location=location,
            hint="give 1 or more of each.",
        )
    output = Path(arguments.output_dir)
    stale_paths = [path for name in ("random", "stage") for path in output.glob(f"{name}-[0-9]*")]
    stale_paths += [output / name for name in ("tokenizer", "pretrained", "finetuned")]
    check_output_directory(
        output, [path.name for path in stale_paths], flag="--output_dir", overwrite=arguments.overwrite
    )
    for path in stale_paths:
        shutil.rmtree(path, ignore_errors=True)
    commands, flags = pretrain(arguments, output)
    summary = TrainingSummary.load(output / "pretrained")
    criteria = evaluate_pretraining(output / "pretrained", flags)
    report_commands = list(commands)
    for seed in range(arguments.seeds):
        save_random_model(output / "pretrained", output / f"random-{seed}", seed)
    for few_labels in [True, False] if arguments.few_labels else [False]:
        transfer, finetuning_commands = finetune(arguments, output, few_labels)
        criteria += transfer
        commands += finetuning_commands
        report_commands += finetuning_commands[-1:]
    save_json(output / "learning.json", criteria, summary, commands)
    shutil.copyfile(output / "pretrained" / "training_curve.png", output / "learning.png")
    text = report(criteria, summary, report_commands, f"{arguments.family}_learning.png")
    (output / "learning.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    run_script(main)
