"""Evaluation of a pretraining recipe: held-out metrics with baselines and targets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from benchmarks.detection import TokenDetector, best_threshold, f1_of_flags
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.corpora import make_objective
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.pretraining import PretrainingArguments, resolve_family
from hf_ctxmodels.training.summary import TrainingSummary

_DETECTOR_TRAINING_STEP = 20  # the baseline detector is fitted on one in 20 training documents
_BATCH_SIZE = 64

TOKEN_MARGIN = 1.0
"""Required margin (nats) of the token loss below the loss of predicting token frequencies."""
PAIR_ACCURACY = 0.6
"""Accuracy that a classifier of segment pairs must exceed."""


@dataclass(frozen=True)
class Criterion:
    """A metric with its baseline and target.

    Attributes:
        name: Name of the metric.
        value: Value on held-out examples.
        baseline: Value without learning.
        target: Target set before the run, in words; empty if there is none.
        is_met: Whether the target is met.
    """

    name: str
    value: str
    baseline: str
    target: str = ""
    is_met: bool = True


@dataclass(frozen=True)
class Detection:
    """F1 of replaced token detection on held-out text, with the threshold that is best on training text.

    Attributes:
        by_model: F1 of the pretrained discriminator.
        by_token: F1 of a `TokenDetector`, which uses no context.
    """

    by_model: float
    by_token: float


def learning_recipes(folder: Path, family: str) -> list[Path]:
    """Recipes for the short pretraining of a family, in order; each continues from the previous one."""
    recipes = sorted(folder.glob(f"{family}_learning*.yaml"))
    if not recipes:
        raise CtxError(f"No recipe {family}_learning*.yaml.", location=str(folder), hint=f"add {family}_learning.yaml.")
    return recipes


def finetuning_recipe(folder: Path, family: str) -> Path:
    """Recipe for fine-tuning a family on sentence polarity; by default polarity_learning.yaml."""
    family_recipe = folder / f"{family}_polarity.yaml"
    return family_recipe if family_recipe.exists() else folder / "polarity_learning.yaml"


def is_token_loss(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric is a loss of token prediction; the loss of a classifier comes with an accuracy or F1."""
    prefix, _, suffix = name.rpartition("_")
    return suffix == "loss" and not any(f"eval_{prefix}_{metric}" in metrics for metric in ("accuracy", "f1"))


def pretraining_criteria(summary: TrainingSummary, detection: Detection | None = None) -> list[Criterion]:
    """Criteria for the held-out metrics of a pretraining run that have a baseline.

    Token losses, accuracies and F1 have targets; the loss of a classifier has none.

    Args:
        summary: Summary of the run.
        detection: Result of `measure_detection`. It replaces the F1 of the run, whose threshold of 0.5 does not suit
            rare replacements.
    """
    criteria = []
    for name, baseline in summary.baselines.items():
        value, baseline = round(summary.metrics[f"eval_{name}"], 3), round(baseline, 3)  # as displayed
        target, is_met = "", True
        if is_token_loss(name, summary.metrics):
            target, is_met = f"{TOKEN_MARGIN} nat below the baseline", value <= baseline - TOKEN_MARGIN
        elif name.endswith("accuracy"):
            target, is_met = f"above {PAIR_ACCURACY} and the baseline", value > max(PAIR_ACCURACY, baseline)
        elif name.endswith("f1"):
            if detection is not None:
                value, baseline = round(detection.by_model, 3), max(baseline, round(detection.by_token, 3))
            target, is_met = "above flagging everything and flagging by token identity", value > baseline
        criteria.append(Criterion(name.replace("_", " "), f"{value:.3f}", f"{baseline:.3f}", target, is_met))
    return criteria


@torch.no_grad()
def measure_detection(pretrained: Path, flags: Sequence[str]) -> Detection | None:
    """Measure replaced token detection of a pretrained generator and discriminator on held-out text.

    Args:
        pretrained: Checkpoint of a pretraining run.
        flags: Command line of the run.

    Returns:
        None for a model without replaced tokens: its output has no `corrupted_ids`.
    """
    arguments, loop_arguments = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
    tokenizer = load_tokenizer(pretrained)
    _, objective = make_objective(resolve_family(arguments), tokenizer, arguments, loop_arguments.seed)
    model = getattr(transformers, objective.auto_class).from_pretrained(pretrained).eval()
    training, held_out = arguments.load()
    assert held_out is not None
    splits = []
    for documents in (islice(training, 0, None, _DETECTOR_TRAINING_STEP), held_out):
        examples = ExampleSet.build(objective.examples(documents))
        columns: list[tuple[np.ndarray, ...]] = []  # corrupted ids, whether they are replaced, scores
        for start in range(0, len(examples), _BATCH_SIZE):
            batch = objective.collate([examples[0, i] for i in range(start, min(start + _BATCH_SIZE, len(examples)))])
            corrupted = model(**batch).get("corrupted_ids")
            if corrupted is None:
                return None
            original = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
            inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids") if name in batch}
            scores = model(input_ids=corrupted, **inputs).logits
            is_token = batch["attention_mask"].bool()
            columns.append(tuple(values[is_token].numpy() for values in (corrupted, corrupted != original, scores)))
        splits.append([np.concatenate(column) for column in zip(*columns, strict=True)])
    (input_ids, replaced, scores), (held_out_ids, held_out_replaced, held_out_scores) = splits
    detector = TokenDetector(len(tokenizer))
    detector.count(input_ids, replaced)
    flagged = held_out_scores >= best_threshold(scores, replaced)
    return Detection(f1_of_flags(flagged, held_out_replaced), detector.f1(held_out_ids, held_out_replaced))


def evaluate_pretraining(pretrained: Path, flags: Sequence[str]) -> list[Criterion]:
    """Criteria for the checkpoint of a pretraining run, given its command line."""
    summary = TrainingSummary.load(pretrained)
    has_detection = any(name.endswith("_f1") for name in summary.baselines)
    return pretraining_criteria(summary, measure_detection(pretrained, flags) if has_detection else None)


@dataclass(frozen=True)
class TransferResult:
    """Fine-tuning results from one initialization.

    Attributes:
        learning_rate: Learning rate with the best dev accuracy.
        dev_accuracies: Accuracy on the dev file by learning rate.
        test_accuracies: Accuracies on the test file, one per seed.
    """

    learning_rate: float
    dev_accuracies: Mapping[float, float]
    test_accuracies: Sequence[float]

    def __str__(self) -> str:
        seeds = " ".join(f"{value:.3f}" for value in self.test_accuracies)
        return f"{mean(self.test_accuracies):.3f} ({seeds}) at {self.learning_rate:g}"


def transfer_criteria(task: str, pretrained: TransferResult, random: TransferResult) -> list[Criterion]:
    """Criteria for fine-tuning from pretrained compared with random weights: dev accuracies and test accuracy."""
    dev, random_dev = (" ".join(f"{value:.3f}" for value in x.dev_accuracies.values()) for x in (pretrained, random))
    rates = ", ".join(f"{rate:g}" for rate in pretrained.dev_accuracies)
    return [
        Criterion(f"{task} dev accuracy at learning rates {rates}", dev, f"{random_dev} from random weights"),
        Criterion(
            f"{task} test accuracy",
            str(pretrained),
            f"{random} from random weights",
            "all seeds above all seeds from random weights",
            min(pretrained.test_accuracies) > max(random.test_accuracies),
        ),
    ]


def save_random_model(pretrained: Path, directory: Path, seed: int) -> None:
    """Save a model with the architecture and tokenizer of a pretrained one and random weights."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(pretrained)
    torch.manual_seed(seed)
    AutoModel.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(directory)


def report(criteria: Sequence[Criterion], summary: TrainingSummary, commands: Sequence[str], curve: str) -> str:
    """Markdown section for a model card: commands, table and training curve.

    Args:
        criteria: Rows of the table.
        summary: Summary of the pretraining run.
        commands: Command lines of the run.
        curve: Link target of the picture of the training curve.
    """
    command_lines = "\n".join(commands)
    rows = [
        f"| {criterion.name} | {criterion.value} | {criterion.baseline} | {criterion.target or '-'} | "
        f"{('yes' if criterion.is_met else '**no**') if criterion.target else '-'} |"
        for criterion in criteria
    ]
    size = (
        f"{summary.model_class}, {summary.parameters:,} parameters, seed {summary.seed}: {summary.steps:,} steps of "
        f"{summary.global_batch_size} sequences of at most {summary.max_length} tokens, {summary.tokens:,} in total"
    )
    speed = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second else ""
    head = "| held-out metric | value | baseline | target | met |\n|---|---|---|---|---|"
    lines = "\n".join(rows)
    return f"```bash\n{command_lines}\n```\n\n{size}{speed}.\n\n{head}\n{lines}\n\n![Losses by step]({curve})\n"


def save_json(file: Path, criteria: Sequence[Criterion], summary: TrainingSummary, commands: Sequence[str]) -> None:
    """Save the criteria, the commands and the summary as JSON."""
    content = {
        "criteria": [asdict(criterion) for criterion in criteria],
        "commands": list(commands),
        "pretraining": asdict(summary),
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
