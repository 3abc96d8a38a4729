"""Suite `serving`: inference of BERT on a CPU by transformers, onnxruntime, OpenVINO and hf_ctxmodels, in float32 or
bfloat16, and in int8 by OpenVINO and hf_ctxmodels.

Each runtime has its own process, because thread pools of several runtimes in one process disturb each other. The
processes run in turns, so that drift of the machine affects all of them equally.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.batches import random_lengths
from benchmarks.cases import FILL, Case
from benchmarks.encoders import build_model
from benchmarks.measure import Measurement
from benchmarks.serving_processes import OPENVINO_INT8, Batch, RuntimeProcess, installed_runtimes
from benchmarks.settings import Settings
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.inference.exporting import export_model

SETTING = (
    "BERT with random weights, one process per runtime, in turns; 'batches' are 64 sequences of 4 to 128 tokens (mean "
    "46) in batches of 16, padded to the longest, in random order or sorted by length; 'one sentence' has 32 tokens; "
    "onnxruntime and OpenVINO run the files of `hf-ctxmodels export`, OpenVINO with the hint LATENCY; onnxruntime "
    "is always in float32; OpenVINO int8 is quantized by nncf with 64 random sequences (no rows without nncf), and "
    "hf_ctxmodels int8 as by `hf-ctxmodels export int8`, with other layers in float32; speed is relative to "
    "transformers; difference is the largest one from hf_ctxmodels, relative to the largest value."
)
CASES = [Case("bert", "inference", layers, width, 128, 16, FILL, None, None) for layers, width in ((4, 256), (12, 768))]
_NUM_BATCHES = 4
_NUM_SENTENCES = 16
_SENTENCE_LENGTH = 32
_PAUSE = 0.25  # seconds, after which the threads of the previous process no longer spin
_HEADER = (
    "| layers x width | input | runtime | time | CPU time | speed | max difference |\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """Times of all runtimes in seconds per sequence, and differences of their outputs, for the input `name`."""

    case: Case
    name: str
    measurements: dict[str, Measurement]
    differences: dict[str, float]


def run(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Result]:
    """Measure all cases on a CPU; the runtimes choose their kernels, and onnxruntime is always in float32."""
    for case in cases:
        if not settings.select_row(case.title):
            continue
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            folder = Path(directory)
            inputs = random_inputs(case, write_models(case, folder))
            threads = torch.get_num_threads()
            processes = {name: RuntimeProcess(name, folder, settings.dtype, threads) for name in installed_runtimes()}
            for process in processes.values():
                stack.callback(process.close)
            for name, batches in inputs.items():
                yield _measure(case, name, batches, processes, settings.repeats)


def write_models(case: Case, folder: Path) -> int:
    """Write the same weights in the formats of all runtimes; returns the size of the vocabulary."""
    model = build_model(case).eval()
    model.save_pretrained(folder / "model")
    model.export_reference(folder / "reference")
    ids = torch.arange(12).view(2, 6)
    examples = [{"input_ids": ids[:, start:], "attention_mask": torch.ones_like(ids[:, start:])} for start in (0, 2)]
    export_model(model, examples, folder / "model.onnx", "onnx")
    export_model(model, examples, folder / "model.xml", "openvino")
    if OPENVINO_INT8 in installed_runtimes():
        _quantize_openvino(folder, case, model.config.vocab_size)
    quantize_model(model, CtxInt8Config())
    model.save_pretrained(folder / "int8")
    return model.config.vocab_size


def _quantize_openvino(folder: Path, case: Case, vocab_size: int) -> None:
    """Quantize `model.xml` by nncf, as docs/how-to/serve.md does."""
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    lengths = torch.cat([random_lengths(case) for _ in range(_NUM_BATCHES)])
    rows = [torch.randint(vocab_size // 10, vocab_size, (1, length)) for length in lengths.tolist()]
    texts = nncf.Dataset([{"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()} for ids in rows])
    program = openvino.Core().read_model(folder / "model.xml")
    with redirect_stdout(sys.stderr):  # progress bars
        quantized = nncf.quantize(program, texts, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(quantized, folder / "int8.xml")


def random_inputs(case: Case, vocab_size: int) -> Mapping[str, list[Batch]]:
    """Random batches by name."""
    lengths = torch.cat([random_lengths(case) for _ in range(_NUM_BATCHES)])
    sentences = torch.full((_NUM_SENTENCES,), min(_SENTENCE_LENGTH, case.length))

    def batches(lengths: torch.Tensor, batch_size: int) -> list[Batch]:
        masks = [(torch.arange(int(rows.max())) < rows[:, None]).long() for rows in lengths.split(batch_size)]
        ids = [torch.randint(vocab_size // 10, vocab_size, mask.shape) * mask for mask in masks]
        return [
            {"input_ids": batch_ids.numpy(), "attention_mask": mask.numpy()}
            for batch_ids, mask in zip(ids, masks, strict=True)
        ]

    return {
        "batches in random order": batches(lengths, case.batch),
        "batches sorted by length": batches(lengths.sort().values, case.batch),
        "one sentence": batches(sentences, 1),
    }


def _measure(
    case: Case, name: str, batches: Sequence[Batch], processes: Mapping[str, RuntimeProcess], repeats: int
) -> Result:
    states = {runtime: process.run(batches)[2] for runtime, process in processes.items()}  # a warm-up as well
    is_token, expected = batches[0]["attention_mask"] != 0, states["hf_ctxmodels"]
    differences = {
        runtime: float(np.abs(output - expected)[is_token].max() / np.abs(expected).max())
        for runtime, output in states.items()
    }
    num_sequences = sum(len(batch["input_ids"]) for batch in batches)
    times: dict[str, list[tuple[float, float]]] = {runtime: [] for runtime in processes}
    for _ in range(repeats):
        for runtime, process in processes.items():
            time.sleep(_PAUSE)
            seconds, cpu_seconds, _ = process.run(batches)
            times[runtime].append((seconds / num_sequences, cpu_seconds / num_sequences))
    return Result(case, name, {runtime: Measurement.summarize(times[runtime]) for runtime in processes}, differences)


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(row for result in results for row in _rows(result))])


def _rows(result: Result) -> Iterator[str]:
    reference = result.measurements["transformers"]
    for runtime, measurement in result.measurements.items():
        cells = [
            f"{result.case.layers} x {result.case.width}",
            result.name,
            runtime,
            f"{1e3 * measurement.seconds:.2f} ms ± {measurement.spread / 2:.0%}",
            f"{1e3 * measurement.cpu_seconds:.2f} ms",
            f"{reference.seconds / measurement.seconds:.2f}x",
            f"{result.differences[runtime]:.0e}",
        ]
        yield f"| {' | '.join(cells)} |"
