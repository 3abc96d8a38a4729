"""Whether a pretraining recipe teaches anything: held-out numbers beside what must be beaten, and by how much."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from hf_ctxmodels.training.summary import TrainingSummary

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


def is_token_loss(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric is the loss of predicted tokens, and not of a classifier, which has an accuracy or F1 too."""
    stem, _, kind = name.rpartition("_")
    return kind == "loss" and not any(f"eval_{stem}_{other}" in metrics for other in ("accuracy", "f1"))


def pretraining_claims(summary: TrainingSummary) -> list[Claim]:
    """Every held-out metric of a pretraining run that has a baseline.

    What is demanded follows from the kind of the number. A classifier's loss is shown and not judged.
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
            demand, reached = "above the baseline", value > baseline
        claims.append(Claim(name.replace("_", " "), f"{value:.3f}", f"{baseline:.3f}", demand, reached))
    return claims


def transfer_claim(task: str, pretrained: Sequence[float], random: Sequence[float]) -> Claim:
    """Fine-tuning from the pretrained weights against fine-tuning from random ones: accuracies, one per seed."""
    return Claim(
        f"{task} accuracy",
        _spread(pretrained),
        f"{_spread(random)} from random weights",
        "every seed above every seed from random weights",
        min(pretrained) > max(random),
    )


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({' '.join(f'{value:.3f}' for value in values)})"


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
