r"""Show that a family learns: tokenizer, pretraining by its recipe, fine-tuning from what came of it and from noise.

    python scripts/learning.py --family bert --dataset '../shared/data/corpus/[!t]*.txt.gz' \
        --train_file ../shared/data/glue_like/SST-2/train.tsv.gz --test_file ../shared/data/glue_like/SST-2/test.tsv \
        --text_column sentence --output_dir runs/bert

Every stage is one of the other scripts; the commands are printed. Leaves learning.md, the section of a model card with
each number beside what it must beat, learning.json and learning.png in the output directory.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import hf_ctxmodels  # noqa: F401 - registers the families
from hf_ctxmodels.benchmarks.learning import (
    Claim,
    detection_by_identity,
    pretraining_claims,
    report,
    save_json,
    save_random_model,
    transfer_claim,
)
from hf_ctxmodels.benchmarks.stages import run_stage
from hf_ctxmodels.errors import CtxError, run_script
from hf_ctxmodels.flags import flag
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.recipe import parse_arguments
from hf_ctxmodels.training.summary import TrainingSummary

SCRIPTS = Path(__file__).parent
RECIPES = Path(os.path.relpath(SCRIPTS)) / "recipes"  # relative, as it stands in the commands that are shown


@dataclass
class LearningArguments:
    """What is to learn, from what."""

    family: str = field(metadata={"help": "Model family.", "choices": list(FAMILIES)})
    output_dir: str = field(metadata={"help": "Directory for everything that is made; what it held is replaced."})
    pretraining: str | None = flag(None, "Recipe of pretrain.py; by default recipes/<family>_learning.yaml.")
    finetuning: str = flag(str(RECIPES / "polarity_learning.yaml"), "Recipe of finetune.py.")
    dataset: str = flag("demo", "Documents to pretrain on, as pretrain.py takes them.")
    train_file: str = flag("demo", "Labelled sentences to fine-tune on, as finetune.py takes them.")
    test_file: str = flag("demo", "Labelled sentences to measure the accuracy on.")
    text_column: str = flag("text", "Column of the labelled sentences.")
    validation_fraction: float = flag(0.02, "Share of the documents held out from tokenizer and pretraining.")
    vocab_size: int = flag(8000, "Tokens of the tokenizer.")
    seeds: int = flag(3, "Fine-tuning runs from either start, with the seeds 0, 1, ...")
    max_steps: int | None = flag(None, "Pretraining steps, instead of the recipe's.")


def pretrain(arguments: LearningArguments, output: Path) -> tuple[list[str], list[str]]:
    """Text -> tokenizer -> pretrained model; gives the commands, and the flags of the second."""
    data = ("--dataset", arguments.dataset, "--validation_fraction", arguments.validation_fraction)
    recipe = arguments.pretraining or RECIPES / f"{arguments.family}_learning.yaml"
    length = () if arguments.max_steps is None else ("--max_steps", arguments.max_steps)
    family = ("--family", arguments.family)
    tokenizer, model = output / "tokenizer", output / "pretrained"
    flags = (*("--recipe", recipe), *family, "--tokenizer", tokenizer, *data, *length, "--output_dir", model)
    commands = [
        run_stage(
            SCRIPTS / "train_tokenizer.py",
            *(*family, "--vocab_size", arguments.vocab_size, *data, "--output_dir", tokenizer),
        ),
        run_stage(SCRIPTS / "pretrain.py", *flags),
    ]
    return commands, [str(flag) for flag in flags]


def finetune(arguments: LearningArguments, output: Path) -> tuple[Claim, list[str]]:
    """Accuracies from the pretrained weights and from random ones, by one recipe; and a command of either."""
    accuracies: dict[str, list[float]] = {"pretrained": [], "random": []}
    commands = {}
    for seed in range(arguments.seeds):
        save_random_model(output / "pretrained", output / f"random-{seed}", seed)
        for start, model in (("pretrained", output / "pretrained"), ("random", output / f"random-{seed}")):
            result = output / f"finetuned-{start}-{seed}"
            commands[start, seed] = run_stage(
                SCRIPTS / "finetune.py",
                *("--recipe", arguments.finetuning, "--model", model, "--seed", seed, "--output_dir", result),
                *("--train_file", arguments.train_file, "--validation_file", arguments.test_file),
                *("--text_columns", arguments.text_column),
            )
            accuracies[start].append(TrainingSummary.load(result).metrics["eval_accuracy"])
    name = "demo" if arguments.train_file == "demo" else Path(arguments.train_file).parent.name
    return transfer_claim(name, accuracies["pretrained"], accuracies["random"]), list(commands.values())


def main() -> None:
    """Run every stage; write and print the table."""
    (arguments,) = parse_arguments(LearningArguments, description=__doc__)
    if arguments.seeds < 1:
        raise CtxError("Nothing is to be fine-tuned.", where=f"--seeds {arguments.seeds}", mend="give 1 or more.")
    output = Path(arguments.output_dir)
    for made in ("tokenizer", "pretrained", *(path.name for path in output.glob("*-[0-9]"))):
        shutil.rmtree(output / made, ignore_errors=True)
    commands, flags = pretrain(arguments, output)
    summary = TrainingSummary.load(output / "pretrained")
    has_detector = any(name.endswith("_f1") for name in summary.baselines)
    detection = detection_by_identity(output / "pretrained", flags) if has_detector else None
    transfer, more = finetune(arguments, output)
    claims = [*pretraining_claims(summary, detection), transfer]
    save_json(output / "learning.json", claims, summary, [*commands, *more])
    shutil.copyfile(output / "pretrained" / "training_curve.png", output / "learning.png")
    text = report(claims, summary, [*commands, *more[:2]], f"{arguments.family}_learning.png")
    (output / "learning.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    run_script(main)
