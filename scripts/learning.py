r"""Show that a family learns: tokenizer, pretraining by its recipe, fine-tuning from what came of it and from noise.

    python scripts/learning.py --family bert --dataset '../shared/data/corpus/[!t]*.txt.gz' \
        --train_file ../shared/data/glue_like/SST-2/train.tsv.gz --dev_file ../shared/data/glue_like/SST-2/dev.tsv \
        --test_file ../shared/data/glue_like/SST-2/test.tsv --text_column sentence --output_dir runs/bert

Every stage is one of the other commands, and printed. Fine-tuning from either start has the learning rate
that serves it best on the dev file; the test file is read with that one alone. Leaves learning.md, the section of a
model card with each number beside what it must beat, learning.json and learning.png in the output directory.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.learning import (
    Claim,
    Transfer,
    finetuning_recipe,
    judge_pretraining,
    learning_recipes,
    report,
    save_json,
    save_random_model,
    transfer_claims,
)
from benchmarks.stages import run_stage

from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_directory
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.recipe import packaged_folder, parse_arguments


@dataclass
class LearningArguments:
    """What is to learn, from what."""

    family: str = field(metadata={"help": "Model family.", "choices": list(FAMILIES)})
    output_dir: str = field(metadata={"help": "Directory for everything that is made."})
    overwrite: bool = flag(False, "Delete what an earlier run has made there.")
    pretraining: list[str] = flag(
        (), "Recipes of pretrain, each going on from the one before; by default <family>_learning*."
    )
    finetuning: str | None = flag(None, "Recipe of finetune; by default <family>_polarity, or else polarity_learning.")
    dataset: list[str] = flag(("demo",), "Documents to pretrain on, as pretrain takes them.")
    train_file: str = flag("demo", "Labelled sentences to fine-tune on, as finetune takes them.")
    dev_file: str = flag("demo", "Labelled sentences to choose the learning rate of either start on.")
    test_file: str = flag("demo", "Labelled sentences to measure the accuracy on.")
    text_column: str = flag("text", "Column of the labelled sentences.")
    validation_fraction: float = flag(0.02, "Share of the documents held out from tokenizer and pretraining.")
    vocab_size: int = flag(8000, "Tokens of the tokenizer.")
    learning_rates: list[float] = flag((5e-4, 1e-3, 2e-3), "Rates of fine-tuning to choose from.")
    few_labels: int = flag(500, "Labelled sentences of a comparison with few; 0 leaves it out.")
    few_epochs: int = flag(20, "Passes over them, instead of the recipe's.")
    seeds: int = flag(3, "Fine-tuning runs from either start, with the seeds 0, 1, ...")
    max_steps: int | None = flag(None, "Pretraining steps of each recipe, instead of its own.")


def pretrain(arguments: LearningArguments, output: Path) -> tuple[list[str], list[str]]:
    """Text -> tokenizer -> pretrained model; gives the commands, and the flags of the last."""
    data = ("--dataset", *arguments.dataset, "--validation_fraction", arguments.validation_fraction)
    packaged = learning_recipes(packaged_folder("recipes"), arguments.family)
    recipes = arguments.pretraining or [path.stem for path in packaged]
    family = ("--family", arguments.family)
    length = () if arguments.max_steps is None else ("--max_steps", arguments.max_steps)
    tokenizer, vocabulary = output / "tokenizer", ("--vocab_size", arguments.vocab_size)
    commands = [run_stage("train-tokenizer", *family, *vocabulary, *data, "--output_dir", tokenizer)]
    start: tuple = family
    for number, recipe in enumerate(recipes, start=1):
        model = output / ("pretrained" if number == len(recipes) else f"stage-{number}")
        flags = ("--recipe", recipe, *start, "--tokenizer", tokenizer, *data, *length, "--output_dir", model)
        commands.append(run_stage("pretrain", *flags))
        start = ("--model", model)
    return commands, [str(flag) for flag in flags]


def finetune(arguments: LearningArguments, output: Path, few: bool) -> tuple[list[Claim], list[str]]:
    """Accuracies from the pretrained weights and from random ones, by one recipe; and the commands."""
    commands: list[str] = []
    size = ("--train_examples", arguments.few_labels, "--num_train_epochs", arguments.few_epochs) if few else ()

    recipe = arguments.finetuning or finetuning_recipe(packaged_folder("recipes"), arguments.family).stem
    files = {"dev": arguments.dev_file, "test": arguments.test_file}

    def accuracy(model: Path, measured_on: str, rate: float, seed: int) -> float:
        result = output / "finetuned" / f"{model.name}-{measured_on}-{'few' if few else 'all'}-{rate:g}-{seed}"
        command = run_stage(
            "finetune",
            "sequence-classification",
            *("--recipe", recipe, "--model", model, "--learning_rate", rate, "--seed", seed),
            *("--train_file", arguments.train_file, *size, "--validation_file", files[measured_on]),
            *("--text_columns", arguments.text_column, "--output_dir", result),
        )
        commands.append(command)
        return TrainingSummary.load(result).metrics["eval_accuracy"]

    outcomes = []
    pretrained = [output / "pretrained"] * arguments.seeds
    for models in (pretrained, [output / f"random-{seed}" for seed in range(arguments.seeds)]):
        tried = {rate: accuracy(models[0], "dev", rate, 0) for rate in arguments.learning_rates}
        rate = max(tried, key=lambda each: tried[each])
        values = [accuracy(model, "test", rate, seed) for seed, model in enumerate(models)]
        outcomes.append(Transfer(rate, tried, values))
    task = "demo" if arguments.train_file == "demo" else Path(arguments.train_file).parent.name
    return transfer_claims(f"{task}, {arguments.few_labels if few else 'all'} labels,", *outcomes), commands


def main() -> None:
    """Run every stage; write and print the table."""
    (arguments,) = parse_arguments(LearningArguments, description=__doc__)
    if arguments.seeds < 1 or not arguments.learning_rates:
        given = f"--seeds {arguments.seeds} --learning_rates {' '.join(map(str, arguments.learning_rates))}"
        raise CtxError("Nothing is to be fine-tuned.", location=given, hint="give 1 or more of either.")
    output = Path(arguments.output_dir)
    made = [path for name in ("random", "stage") for path in output.glob(f"{name}-[0-9]*")]
    made += [output / name for name in ("tokenizer", "pretrained", "finetuned")]
    check_output_directory(output, [path.name for path in made], flag="--output_dir", overwrite=arguments.overwrite)
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
    commands, flags = pretrain(arguments, output)
    summary = TrainingSummary.load(output / "pretrained")
    claims = judge_pretraining(output / "pretrained", flags)
    shown = list(commands)
    for seed in range(arguments.seeds):
        save_random_model(output / "pretrained", output / f"random-{seed}", seed)
    for few in [True, False] if arguments.few_labels else [False]:
        transfer, more = finetune(arguments, output, few)
        claims += transfer
        commands += more
        shown += more[-1:]
    save_json(output / "learning.json", claims, summary, commands)
    shutil.copyfile(output / "pretrained" / "training_curve.png", output / "learning.png")
    text = report(claims, summary, shown, f"{arguments.family}_learning.png")
    (output / "learning.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    run_script(main)
