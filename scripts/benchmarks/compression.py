"""The suite `compression`: a BERT with weights of 8 bits against single and half precision, ours and the peer's."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.batches import random_batches, random_lengths
from benchmarks.cases import FILL, Case
from benchmarks.encoders import build_model
from benchmarks.measure import Measurement, Step, measure
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model

SETTING = (
    "BERT of random weights; int8 has a scale for each token, or for each call's tensor; speed is the time of ours in "
    "float32 over that of a side; cosine is the mean over tokens of the states' with those of ours in float32; size is "
    "that of the safetensors file."
)
# width -> expected minimum of the speed of int8 over ours in float32, and over ours in bfloat16
EXPECTED = {768: (2.3, 1.3), 256: (1.5, None)}
CASES = [
    Case("bert", "inference", layers, width, 128, batch, fill, None, None)
    for layers, width in ((4, 256), (12, 768))
    for batch in (1, 32)
    for fill in (FILL, 1.0)
    if batch > 1 or fill == 1.0  # a single row has no padding
]
_HEADER = (
    "| work | side | time | CPU time | speed | CPU speed | expected | memory | size | cosine |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One case: what each side costs, how large its file is, and how near its states are."""

    case: Case
    measured: dict[str, Measurement]
    sizes: dict[str, int]
    cosines: dict[str, float]


def run(
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    only: str | None = None,
    cases: Sequence[Case] = CASES,
) -> Iterator[Result]:
    """Measure every case.

    Args:
        device, dtype: Not used: weights of 8 bits are for a CPU, and the precisions are the sides.
        repeats: Timed runs of each side.
        attention: Attention implementation of the peer.
        only: Run the cases that `Case.chosen_by` chooses.
        cases: What to run.
    """
    for case in cases:
        if case.chosen_by(only):
            torch.manual_seed(0)
            sides, sizes = make_sides(case, attention)
            batch = random_batches(sides["ours, float32"], random_lengths(case), case)["ours"]
            cosines = _cosines(sides, batch)
            steps = {name: _step(model, batch) for name, model in sides.items()}
            yield Result(case, measure(steps, repeats, torch.device("cpu")), sizes, cosines)


def make_sides(case: Case, attention: str) -> tuple[dict[str, PreTrainedModel], dict[str, int]]:
    """The same weights in all forms, and the size of each one's file in bytes."""
    ours = build_model(case).eval()
    with tempfile.TemporaryDirectory() as folder:
        ours.export_reference(folder)
        peer = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention)
    sides = {"transformers, float32": peer, "ours, float32": ours, "ours, bfloat16": copy.deepcopy(ours).bfloat16()}
    for activations in ("token", "tensor"):
        sides[f"ours, int8 by {activations}"] = quantized = copy.deepcopy(ours)
        quantize_model(quantized, CtxInt8Config(activations=activations))  # type: ignore[arg-type]
    return sides, {name: _file_size(model) for name, model in sides.items()}


def _file_size(model: PreTrainedModel) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def _step(model: PreTrainedModel, batch: dict[str, Tensor]) -> Step:
    @torch.inference_mode()
    def step() -> None:
        model(**batch)

    return step


@torch.inference_mode()
def _cosines(sides: dict[str, PreTrainedModel], batch: dict[str, Tensor]) -> dict[str, float]:
    real = batch["attention_mask"].bool()
    states = {name: model(**batch).last_hidden_state[real].float() for name, model in sides.items()}
    expected = states["ours, float32"]
    return {name: float(F.cosine_similarity(found, expected, dim=-1).mean()) for name, found in states.items()}


def table(results: Sequence[Result]) -> str:
    """Render results; a missed expectation is set in bold."""
    return "\n".join([_HEADER, *(row for result in results for row in _rows(result))])


def _rows(result: Result) -> Iterator[str]:
    single, half = (result.measured[f"ours, {name}"] for name in ("float32", "bfloat16"))
    above_single, above_half = EXPECTED.get(result.case.width, (None, None))
    for name, own in result.measured.items():
        speed = single.seconds / own.seconds
        missed, expected = False, "-"
        if "int8" in name and above_single is not None and result.case.batch > 1:
            least = max(above_single, (above_half or 0) * single.seconds / half.seconds)
            missed, expected = speed < least, f"≥ {least:.2f}x"
        shown = f"{speed:.2f}x"
        cells = [
            result.case.name,
            name,
            f"{1e3 * own.seconds:.0f} ms ± {own.spread / 2:.0%}",
            f"{1e3 * own.cpu_seconds:.0f} ms",
            f"**{shown} (missed)**" if missed else shown,
            f"{single.cpu_seconds / own.cpu_seconds:.2f}x",
            expected,
            f"{own.peak_bytes / 1e6:,.0f} MB",
            f"{result.sizes[name] / 1e6:,.1f} MB",
            f"{result.cosines[name]:.5f}",
        ]
        yield f"| {' | '.join(cells)} |"
