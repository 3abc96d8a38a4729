"""Suite `sharing`: parameters, time and memory of ALBERT's parameter sharing and embedding factorization.

The shape is ALBERT-base, as in the ablation of Lan et al. 2019 (tables 3 and 4); accuracies are not measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from benchmarks.batches import random_batches, random_lengths
from benchmarks.cases import Case
from benchmarks.encoders import build_model, training_step
from benchmarks.measure import Measurement, measure
from benchmarks.settings import Settings
from hf_ctxmodels.models.albert.shared_layers import Scope

CASE = Case("albert", "pretraining", 12, 768, 128, 4, 1.0, None, None)
EMBEDDING_SIZES = (64, 128, 256, 768)
SETTING = (
    "one pretraining step (masked language modeling and sentence order, backward, fused AdamW); the four sharing "
    "scopes are interleaved for each embedding size, and 'time ratio' is relative to no sharing; peak memory excludes "
    "weights and optimizer state."
)
_HEADER = (
    "| embedding size E | sharing | encoder parameters | with pretraining head | step | time ratio | peak memory |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        case: Benchmark case; `config` has the embedding size and the sharing scope.
        encoder_parameters, parameters: Number of parameters without and with the pretraining head.
        step: Measurement of the step.
        unshared: Measurement of the step without sharing, at the same embedding size.
    """

    case: Case
    encoder_parameters: int
    parameters: int
    step: Measurement
    unshared: Measurement


def run(settings: Settings) -> Iterator[Result]:
    """Run the four sharing scopes at each embedding size; the name of an embedding size is, for example, "E=128"."""
    for embedding_size in EMBEDDING_SIZES:
        if settings.select_row(f"E={embedding_size}"):
            yield from _run_embedding_size(embedding_size, settings)


def _run_embedding_size(embedding_size: int, settings: Settings) -> list[Result]:
    cases, models, steps = {}, {}, {}
    for scope in get_args(Scope):
        sharing = {"embedding_size": embedding_size, "parameter_sharing": scope}
        cases[scope] = replace(CASE, config=CASE.config | sharing)
        torch.manual_seed(0)
        models[scope] = build_model(cases[scope]).to(settings.device)
        batch = random_batches(models[scope], random_lengths(cases[scope]), cases[scope])["model"]
        batch = {name: tensor.to(settings.device) for name, tensor in batch.items()}
        steps[scope] = training_step(models[scope], batch, settings.torch_dtype, CASE.workload)
    measurements = measure(steps, settings)
    return [
        Result(
            case=cases[scope],
            encoder_parameters=models[scope].base_model.num_parameters(),
            parameters=models[scope].num_parameters(),
            step=measurements[scope],
            unshared=measurements["none"],
        )
        for scope in steps
    ]


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
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
