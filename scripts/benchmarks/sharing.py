"""The suite `sharing`: what ALBERT's two ideas save, and what they cost (Lan et al. 2019, tables 3 and 4).

The shape is that of the paper's ablation, ALBERT-base; the accuracies of its tables are not measured here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from benchmarks.batches import random_batches, random_lengths
from benchmarks.cases import Case
from benchmarks.encoders import build_model, training_step
from benchmarks.measure import Measurement, measure
from hf_ctxmodels.models.albert.shared_layers import Scope

CASE = Case("albert", "pretraining", 12, 768, 128, 4, 1.0, None, None)
WIDTHS = (64, 128, 256, 768)
SETTING = (
    "one pretraining step (masked words and sentence order, backward, fused AdamW); the four ways of sharing are run "
    "in turn for each width of the embeddings, and 'time of none' is against the one that shares nothing; peak memory "
    "is what a step holds beyond weights and optimizer state."
)
_HEADER = (
    "| embeddings E | shared | encoder parameters | with pretraining head | step | time of none | peak memory |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        case: What was run; its `config` holds the width of the embeddings and the scope of sharing.
        encoder_parameters, parameters: Without and with the pretraining head, tied ones once.
        step: What a step costs.
        unshared: What a step costs at the same width without sharing.
    """

    case: Case
    encoder_parameters: int
    parameters: int
    step: Measurement
    unshared: Measurement


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Run the four scopes of sharing at each width of the embeddings.

    Args:
        device, dtype: Where and in which precision (by autocast).
        repeats: Timed steps of each.
        attention: Not used: there is no peer.
        only: Run the widths in whose name, "E=128", this text occurs.
    """
    for width in WIDTHS:
        if only is None or only in f"E={width}":
            yield from _run_width(width, device, dtype, repeats)


def _run_width(width: int, device: torch.device, dtype: torch.dtype, repeats: int) -> list[Result]:
    cases, models, steps = {}, {}, {}
    for scope in get_args(Scope):
        sharing = {"embedding_size": width, "parameter_sharing": scope}
        cases[scope] = replace(CASE, config=CASE.config | sharing)
        torch.manual_seed(0)
        models[scope] = build_model(cases[scope]).to(device)
        batch = random_batches(models[scope], random_lengths(cases[scope]), cases[scope])["ours"]
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        steps[scope] = training_step(models[scope], batch, dtype, CASE.work)
    measured = measure(steps, repeats, device)
    return [
        Result(
            case=cases[scope],
            encoder_parameters=models[scope].base_model.num_parameters(),
            parameters=models[scope].num_parameters(),
            step=measured[scope],
            unshared=measured["none"],
        )
        for scope in steps
    ]


def table(results: Sequence[Result]) -> str:
    """Render results."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    config, step = result.case.config, result.step
    cells = [
        str(config["embedding_size"]),
        config["parameter_sharing"],
        f"{result.encoder_parameters:,}",
        f"{result.parameters:,}",
        f"{1e3 * step.seconds:.0f} ms ± {step.spread / 2:.0%}",
        f"{step.seconds / result.unshared.seconds:.2f}x",
        f"{step.peak_bytes / 1e6:,.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"
