"""Suite `adapters`: cost of a Pfeiffer adapter in a training step, with trainable and with frozen model weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.batches import random_batches, random_lengths
from benchmarks.cases import Case
from benchmarks.encoders import build_model, training_step
from benchmarks.measure import Measurement, measure
from benchmarks.settings import Settings
from hf_ctxmodels.downstream.adapters import add_adapter, set_active_adapters, train_adapter

CASES = [Case("bert", "pretraining", 4, 256, 128, 32, fill, None, None) for fill in (0.36, 1.0)]
SETTING = (
    "one step of BERT's pretraining (forward, backward, fused AdamW), interleaved: the model without adapters, with a "
    "Pfeiffer adapter (reduction 16) trained jointly with all weights, and with an adapter and frozen weights."
)
_HEADER = (
    "| case | adapter parameters | no adapter | joint training | CPU time ratio | frozen model | CPU time ratio |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        case: Benchmark case.
        parameters: Number of adapter parameters.
        steps: Measurements of "none", "joint" and "frozen".
    """

    case: Case
    parameters: int
    steps: dict[str, Measurement]


def run(settings: Settings) -> Iterator[Result]:
    """Run each case."""
    for case in CASES:
        if settings.select_row(case.title):
            yield _run_case(case, settings)


def _run_case(case: Case, settings: Settings) -> Result:
    models: dict[str, PreTrainedModel] = {}
    steps: dict[str, Any] = {}
    batch: dict[str, Tensor] = {}
    for name in ("none", "joint", "frozen"):
        torch.manual_seed(0)
        models[name] = build_model(case).to(settings.device)
        if name != "none":
            add_adapter(models[name], "a", "pfeiffer")
            set_active_adapters(models[name], "a")
        if name == "frozen":
            train_adapter(models[name], "a", freeze_head=True)
        batch = batch or random_batches(models[name], random_lengths(case), case)["model"]
        inputs = {key: tensor.to(settings.device) for key, tensor in batch.items()}
        steps[name] = training_step(models[name], inputs, settings.torch_dtype, case.workload)
    trainable = sum(parameter.numel() for parameter in models["frozen"].parameters() if parameter.requires_grad)
    return Result(case, trainable, measure(steps, settings))


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    none, joint, frozen = (result.steps[name] for name in ("none", "joint", "frozen"))
    cells = [result.case.name, f"{result.parameters:,}", f"{1e3 * none.seconds:.1f} ms ± {none.spread / 2:.0%}"]
    for step in (joint, frozen):
        cells += [f"{1e3 * step.seconds:.1f} ms", f"{step.cpu_seconds / none.cpu_seconds:.2f}x CPU"]
    return f"| {' | '.join(cells)} |"
