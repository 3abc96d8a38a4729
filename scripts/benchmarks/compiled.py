"""Suite `compile`: `torch.compile` with default options against the same model uncompiled, on padded batches."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from benchmarks import seq2seq
from benchmarks.batches import random_batches, random_lengths
from benchmarks.cases import FILL, Case
from benchmarks.encoders import build_model, inference_step, training_step
from benchmarks.measure import Measurement, Step, measure
from benchmarks.settings import Settings
from hf_ctxmodels.core.constants import IGNORE_INDEX

LENGTHS = (128, 112, 96)  # longest sequence of each batch
SIZES = {(4, 256): 16, (12, 768): 8}  # layers and hidden size: batch size
FAMILIES = ("bert", "albert", "electra", "xlnet", "t5", "gpt2")
SETTING = (
    f"each step runs {len(LENGTHS)} batches of different lengths, {FILL:.0%} filled: inference of the base model (t5: "
    "its encoder), or forward and backward pass with the pretraining head (xlnet: no padding); `torch.compile(model)` "
    "and the uncompiled model are interleaved; times are per batch."
)
_HEADER = (
    "| model | workload | shape | uncompiled | compiled | speedup | graphs | graph breaks | compilation |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        case: Benchmark case of the first batch.
        uncompiled, compiled: Measurements of one step.
        graphs, breaks: Number of compiled graphs, and of graph breaks.
        compilation: Seconds of the first step, with compilation.
    """

    case: Case
    uncompiled: Measurement
    compiled: Measurement
    graphs: int
    breaks: int
    compilation: float


def run(settings: Settings) -> Iterator[Result]:
    """Run all families and sizes."""
    for (layers, width), batch_size in SIZES.items():
        for family in FAMILIES:
            for workload in _workloads(family):
                # random permutations predict any position
                fill = 1.0 if (family, workload) == ("xlnet", "gradients") else FILL
                case = Case(family, workload, layers, width, LENGTHS[0], batch_size, fill, None, None)
                if settings.select_row(case.title):
                    yield run_case(case, settings)


def _workloads(family: str) -> tuple:
    return ("encoder states", "training") if family == "t5" else ("inference", "gradients")


def run_case(case: Case, settings: Settings) -> Result:
    """Measure a model and the compiled model; `case.length` is ignored: the batches have the lengths `LENGTHS`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    batches: list[dict[str, Tensor]] = []
    model: PreTrainedModel = (seq2seq.build_model if case.family == "t5" else build_model)(case)
    for length in LENGTHS:
        batch_case = replace(case, length=length)
        batch = random_batches(model, random_lengths(batch_case), batch_case)["model"]
        if case.workload == "training":
            batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, IGNORE_INDEX)[:, : length // 2]
        batches.append({name: tensor.to(settings.device) for name, tensor in batch.items()})
    if case.workload == "encoder states":
        model = model.get_encoder()
    model.to(settings.device)
    models = {"uncompiled": model, "compiled": torch.compile(model)}
    steps = {name: _step(model, batches, case, settings.torch_dtype) for name, model in models.items()}
    start = time.perf_counter()
    steps["compiled"]()
    compilation = time.perf_counter() - start
    measurements = measure(steps, settings)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Result(case, measurements["uncompiled"], measurements["compiled"], graphs, breaks, compilation)


def _step(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], case: Case, dtype: torch.dtype) -> Step:
    make_step = training_step if case.has_backward else inference_step
    workload = "gradients" if case.has_backward else case.workload  # without an update, which is not compiled
    batch_steps = [make_step(model, batch, dtype, workload) for batch in batches]
    return lambda: [step() for step in batch_steps]


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    case = result.case
    seconds = [measurement.seconds for measurement in (result.uncompiled, result.compiled)]
    cells = [
        case.family,
        "training" if case.has_backward else "inference",
        f"{case.layers}x{case.width}, B={case.batch}, T={case.length}",
        *(f"{1e3 * value / len(LENGTHS):.0f} ms" for value in seconds),
        f"{seconds[0] / seconds[1]:.2f}x",
        str(result.graphs),
        str(result.breaks),
        f"{result.compilation:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"
