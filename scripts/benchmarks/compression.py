"""Suite `compression`: BERT with int8 weights compared with float32, bfloat16 and transformers."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from benchmarks.settings import Settings
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model

SETTING = (
    "BERT with random weights; int8 activations are quantized per token or per tensor; speedup is relative to "
    "hf_ctxmodels in float32; cosine is the mean cosine similarity of hidden states with hf_ctxmodels in float32; size "
    "is the size of the safetensors file."
)
# Hidden size -> target speedups of int8 over float32 and over bfloat16.
TARGETS = {768: (2.3, 1.3), 256: (1.5, None)}
CASES = [
    Case("bert", "inference", layers, width, 128, batch, fill, None, None)
    for layers, width in ((4, 256), (12, 768))
    for batch in (1, 32)
    for fill in (FILL, 1.0)
    if batch > 1 or fill == 1.0  # a single sequence has no padding
]
_HEADER = (
    "| workload | implementation | time | CPU time | speedup | CPU time ratio | target "
    "| peak memory | size | cosine |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """Time and memory, file sizes and cosine similarities of the implementations in one case."""

    case: Case
    measurements: dict[str, Measurement]
    sizes: dict[str, int]
    cosines: dict[str, float]


def run(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Result]:
    """Measure all cases on a CPU, because int8 runs there; each row has its own precision."""
    cpu_settings = replace(settings, device="cpu")
    for case in cases:
        if settings.select_row(case.title):
            torch.manual_seed(0)
            models, sizes = build_models(case, settings.reference_attention)
            batch = random_batches(models["hf_ctxmodels, float32"], random_lengths(case), case)["model"]
            cosines = _cosines(models, batch)
            steps = {name: _step(model, batch) for name, model in models.items()}
            yield Result(case, measure(steps, cpu_settings), sizes, cosines)


def build_models(case: Case, attention: str) -> tuple[dict[str, PreTrainedModel], dict[str, int]]:
    """Models with the same weights by implementation and precision, and their file sizes in bytes."""
    model = build_model(case).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.export_reference(folder)
        reference = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention)
    models = {
        "transformers, float32": reference,
        "hf_ctxmodels, float32": model,
        "hf_ctxmodels, bfloat16": copy.deepcopy(model).bfloat16(),
    }
    for activations in ("token", "tensor"):
        models[f"hf_ctxmodels, int8 by {activations}"] = quantized = copy.deepcopy(model)
        quantize_model(quantized, CtxInt8Config(activations=activations))  # type: ignore[arg-type]
    return models, {name: _file_size(model) for name, model in models.items()}


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
def _cosines(models: dict[str, PreTrainedModel], batch: dict[str, Tensor]) -> dict[str, float]:
    is_token = batch["attention_mask"].bool()
    hidden_states = {name: model(**batch).last_hidden_state[is_token].float() for name, model in models.items()}
    expected = hidden_states["hf_ctxmodels, float32"]
    return {name: float(F.cosine_similarity(states, expected, dim=-1).mean()) for name, states in hidden_states.items()}


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown; missed targets are bold."""
    return "\n".join([_HEADER, *(row for result in results for row in _rows(result))])


def _rows(result: Result) -> Iterator[str]:
    float32, bfloat16 = (result.measurements[f"hf_ctxmodels, {name}"] for name in ("float32", "bfloat16"))
    float32_target, bfloat16_target = TARGETS.get(result.case.width, (None, None))
    for name, measurement in result.measurements.items():
        speedup = float32.seconds / measurement.seconds
        is_missed, target = False, "-"
        if "int8" in name and float32_target is not None and result.case.batch > 1:
            required = max(float32_target, (bfloat16_target or 0) * float32.seconds / bfloat16.seconds)
            is_missed, target = speedup < required, f"≥ {required:.2f}x"
        cells = [
            result.case.name,
            name,
            f"{1e3 * measurement.seconds:.0f} ms ± {measurement.spread / 2:.0%}",
            f"{1e3 * measurement.cpu_seconds:.0f} ms",
            f"**{speedup:.2f}x (missed)**" if is_missed else f"{speedup:.2f}x",
            f"{float32.cpu_seconds / measurement.cpu_seconds:.2f}x",
            target,
            f"{measurement.peak_bytes / 1e6:,.0f} MB",
            f"{result.sizes[name] / 1e6:,.1f} MB",
            f"{result.cosines[name]:.5f}",
        ]
        yield f"| {' | '.join(cells)} |"
