"""The suite `adapters`: what a Pfeiffer adapter costs in a training step, and what freezing the rest saves."""

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
from hf_ctxmodels.downstream.adapters import add_adapter, set_active_adapters, train_adapter

CASES = [Case("bert", "pretraining", 4, 256, 128, 32, fill, None, None) for fill in (0.36, 1.0)]
SETTING = (
    "one step of BERT's pretraining (forward, backward, fused AdamW); in turn the model without adapters, with a "
    "Pfeiffer adapter of reduction 16 that is trained beside all weights, and with one that is trained alone."
)
_HEADER = (
    "| case | trained parameters | without | with an adapter | of without | the adapter alone | of without |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        case: What was run.
        parameters: Those of the adapter.
        steps: "none", "beside" and "alone" -> what a step costs.
    """

    case: Case
    parameters: int
    steps: dict[str, Measurement]


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Run each case.

    Args:
        device, dtype: Where and in which precision (by autocast).
        repeats: Timed steps of each.
        attention: Not used: there is no peer.
        only: See `Case.chosen_by`.
    """
    for case in CASES:
        if case.chosen_by(only):
            yield _run_case(case, device, dtype, repeats)


def _run_case(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> Result:
    models: dict[str, PreTrainedModel] = {}
    steps: dict[str, Any] = {}
    batch: dict[str, Tensor] = {}
    for name in ("none", "beside", "alone"):
        torch.manual_seed(0)
        models[name] = build_model(case).to(device)
        if name != "none":
            add_adapter(models[name], "a", "pfeiffer")
            set_active_adapters(models[name], "a")
        if name == "alone":
            train_adapter(models[name], "a", freeze_head=True)
        batch = batch or random_batches(models[name], random_lengths(case), case)["ours"]
        given = {key: tensor.to(device) for key, tensor in batch.items()}
        steps[name] = training_step(models[name], given, dtype, case.work)
    trained = sum(each.numel() for each in models["alone"].parameters() if each.requires_grad)
    return Result(case, trained, measure(steps, repeats, device))


def table(results: Sequence[Result]) -> str:
    """Render results."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    none, beside, alone = (result.steps[name] for name in ("none", "beside", "alone"))
    cells = [result.case.name, f"{result.parameters:,}", f"{1e3 * none.seconds:.1f} ms ± {none.spread / 2:.0%}"]
    for step in (beside, alone):
        cells += [f"{1e3 * step.seconds:.1f} ms", f"{step.cpu_seconds / none.cpu_seconds:.2f}x CPU"]
    return f"| {' | '.join(cells)} |"
