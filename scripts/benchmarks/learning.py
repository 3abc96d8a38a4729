"""Whether a pretraining recipe teaches anything: held-out numbers beside what must be beaten, and by how much."""

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
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.pretraining import PretrainingArguments, make_objective, resolve_family
from hf_ctxmodels.training.recipe import parse_arguments

_DETECTOR_TRAINS_ON_ONE_IN = 20  # documents: enough to know how often each token is replaced
_ROWS = 64

TOKEN_MARGIN = 1.0
"""Nats by which the loss on predicted tokens must be below that of guessing them by their frequency."""
PAIR_ACCURACY = 0.6
"""What a classifier of segment pairs must exceed."""


@dataclass(frozen=True)
class Claim:
    """One number, and what it must beat.

    Attributes:
        name: what was measured.
        value: on held-out examples.
        baseline: what needs no learning gets.
        demanded: what was demanded before the run, in words; empty where nothing was.
        reached: whether it was reached.
    """

    name: str
    value: str
    baseline: str
    demanded: str = ""
    reached: bool = True


@dataclass(frozen=True)
class Detection:
    """F1 on held-out text of two detectors of replaced tokens, either with the threshold that is best on training text.

    Attributes:
        by_model: of the pretrained discriminator.
        by_token: of a `TokenDetector`, which reads no context.
    """

    by_model: float
    by_token: float


def learning_recipes(folder: Path, family: str) -> list[Path]:
    """The recipes by which a tiny model of a family learns: one, or several that go on from each other."""
    recipes = sorted(folder.glob(f"{family}_learning*.yaml"))
    if not recipes:
        raise CtxError("No recipe to learn by.", location=str(folder), hint=f"write {family}_learning.yaml.")
    return recipes


def finetuning_recipe(folder: Path, family: str) -> Path:
    """The recipe by which a tiny model of a family is fine-tuned on polarity: its own, or that of most."""
    own = folder / f"{family}_polarity.yaml"
    return own if own.exists() else folder / "polarity_learning.yaml"


def is_token_loss(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric is the loss of predicted tokens, and not of a classifier, which has an accuracy or F1 too."""
    stem, _, kind = name.rpartition("_")
    return kind == "loss" and not any(f"eval_{stem}_{other}" in metrics for other in ("accuracy", "f1"))


def pretraining_claims(summary: TrainingSummary, detection: Detection | None = None) -> list[Claim]:
    """Every held-out metric of a pretraining run that has a baseline.

    What is demanded follows from the kind of the number. A classifier's loss is shown and not judged.

    Args:
        summary: of the run.
        detection: what `measure_detection` gets. It takes the place of an F1, whose threshold of one half says little
            about what is rare: both detectors have theirs from training text.
    """
    claims = []
    for name, baseline in summary.baselines.items():
        value, baseline = round(summary.metrics[f"eval_{name}"], 3), round(baseline, 3)  # as they are shown
        demand, reached = "", True
        if is_token_loss(name, summary.metrics):
            demand, reached = f"{TOKEN_MARGIN} nat below the baseline", value <= baseline - TOKEN_MARGIN
        elif name.endswith("accuracy"):
            demand, reached = f"above {PAIR_ACCURACY} and the baseline", value > max(PAIR_ACCURACY, baseline)
        elif name.endswith("f1"):
            if detection is not None:
                value, baseline = round(detection.by_model, 3), max(baseline, round(detection.by_token, 3))
            demand, reached = "above flagging everything and flagging by the token alone", value > baseline
        claims.append(Claim(name.replace("_", " "), f"{value:.3f}", f"{baseline:.3f}", demand, reached))
    return claims


@torch.no_grad()
def measure_detection(pretrained: Path, flags: Sequence[str]) -> Detection | None:
    """Let a pretrained pair replace tokens of training and held-out text, and find them.

    Args:
        pretrained: a checkpoint that pretrain.py left.
        flags: the command line that it had.

    Returns:
        None for a model that replaces nothing: its output has no `corrupted_ids`.
    """
    arguments, loop_arguments = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
    tokenizer = load_tokenizer(pretrained)
    _, objective = make_objective(resolve_family(arguments), tokenizer, arguments, loop_arguments.seed)
    model = getattr(transformers, objective.auto_class).from_pretrained(pretrained).eval()
    training, held_out = arguments.load()
    assert held_out is not None
    sides = []
    for documents in (islice(training, 0, None, _DETECTOR_TRAINS_ON_ONE_IN), held_out):
        examples = ExampleSet.build(objective.examples(documents))
        columns: list[tuple[np.ndarray, ...]] = []  # what was read, whether it was a replacement, how it was scored
        for start in range(0, len(examples), _ROWS):
            batch = objective.collate([examples[0, i] for i in range(start, min(start + _ROWS, len(examples)))])
            corrupted = model(**batch).get("corrupted_ids")
            if corrupted is None:
                return None
            original = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
            inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids") if name in batch}
            scores = model(input_ids=corrupted, **inputs).logits
            tokens = batch["attention_mask"].bool()
            columns.append(tuple(each[tokens].numpy() for each in (corrupted, corrupted != original, scores)))
        sides.append([np.concatenate(column) for column in zip(*columns, strict=True)])
    (read, replaced, scores), (held_out_read, held_out_replaced, held_out_scores) = sides
    detector = TokenDetector(len(tokenizer))
    detector.count(read, replaced)
    found = held_out_scores >= best_threshold(scores, replaced)
    return Detection(f1_of_flags(found, held_out_replaced), detector.f1(held_out_read, held_out_replaced))


def judge_pretraining(pretrained: Path, flags: Sequence[str]) -> list[Claim]:
    """The claims about a checkpoint that pretrain.py left, given the command line that it had."""
    summary = TrainingSummary.load(pretrained)
    detects = any(name.endswith("_f1") for name in summary.baselines)
    return pretraining_claims(summary, measure_detection(pretrained, flags) if detects else None)


@dataclass(frozen=True)
class Transfer:
    """Fine-tuning from one start.

    Attributes:
        rate: learning rate, the best on the dev file of those tried.
        tried: rate -> accuracy on the dev file.
        accuracies: on the test file, one per seed.
    """

    rate: float
    tried: Mapping[float, float]
    accuracies: Sequence[float]

    def __str__(self) -> str:
        seeds = " ".join(f"{value:.3f}" for value in self.accuracies)
        return f"{mean(self.accuracies):.3f} ({seeds}) at {self.rate:g}"


def transfer_claims(task: str, pretrained: Transfer, random: Transfer) -> list[Claim]:
    """Fine-tuning from the pretrained weights against fine-tuning from random ones: choice of rates, and test."""
    tried = [" ".join(f"{value:.3f}" for value in start.tried.values()) for start in (pretrained, random)]
    rates = ", ".join(f"{rate:g}" for rate in pretrained.tried)
    return [
        Claim(f"{task} dev accuracy at the rates {rates}", tried[0], f"{tried[1]} from random weights"),
        Claim(
            f"{task} test accuracy",
            str(pretrained),
            f"{random} from random weights",
            "every seed above every seed from random weights",
            min(pretrained.accuracies) > max(random.accuracies),
        ),
    ]


def save_random_model(pretrained: Path, directory: Path, seed: int) -> None:
    """The architecture and tokenizer of a pretrained model with new random weights."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(pretrained)
    torch.manual_seed(seed)
    AutoModel.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(directory)


def report(claims: Sequence[Claim], summary: TrainingSummary, commands: Sequence[str], curve: str) -> str:
    """The Markdown of a card's section: how it was made, the table, the curve.

    Args:
        claims: rows of the table.
        summary: of the pretraining run.
        commands: that made the numbers.
        curve: where the picture lies, as the card links it.
    """
    made = "\n".join(commands)
    rows = [
        f"| {claim.name} | {claim.value} | {claim.baseline} | {claim.demanded or '-'} | "
        f"{('yes' if claim.reached else '**no**') if claim.demanded else '-'} |"
        for claim in claims
    ]
    size = (
        f"{summary.model_class}, {summary.parameters:,} parameters, seed {summary.seed}: {summary.steps:,} steps of "
        f"{summary.global_batch_size} rows of at most {summary.max_length} tokens, {summary.tokens:,} tokens in all"
    )
    speed = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second else ""
    head = "| held out | value | baseline | demanded | reached |\n|---|---|---|---|---|"
    lines = "\n".join(rows)
    return f"```bash\n{made}\n```\n\n{size}{speed}.\n\n{head}\n{lines}\n\n![Losses by step]({curve})\n"


def save_json(file: Path, claims: Sequence[Claim], summary: TrainingSummary, commands: Sequence[str]) -> None:
    """Everything that the table says, for programs."""
    content = {
        "claims": [asdict(claim) for claim in claims],
        "commands": list(commands),
        "pretraining": asdict(summary),
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
