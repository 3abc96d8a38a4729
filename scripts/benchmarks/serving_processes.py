"""Processes of the suite `serving`, which import their own runtime only."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Batch: TypeAlias = dict[str, np.ndarray]
Forward = Callable[[Batch], np.ndarray]
"""(batch, length) ids and mask -> (batch, length, hidden) states."""
Load = Callable[[Path, str, int], Forward]
"""Directory of all files, precision ("float32" or "bfloat16") and number of threads -> forward pass."""


def _load_transformers(folder: Path, dtype: str, threads: int) -> Forward:
    return _torch_forward(folder / "reference", dtype, threads)


def _load_model(folder: Path, dtype: str, threads: int) -> Forward:
    import hf_ctxmodels  # noqa: F401, registers the models

    return _torch_forward(folder / "model", dtype, threads)


def _load_prepared(folder: Path, dtype: str, threads: int) -> Forward:
    import hf_ctxmodels  # noqa: F401, registers the models

    return _torch_forward(folder / "model", dtype, threads, lambda model: model.prepare_for_inference())


def _load_int8(folder: Path, dtype: str, threads: int) -> Forward:
    import hf_ctxmodels  # noqa: F401, registers the models and their quantization

    return _torch_forward(folder / "int8", "float32", threads)  # the layers that are not quantized


def _torch_forward(
    folder: Path, dtype: str, threads: int, prepare: Callable[[Any], Any] = lambda model: model
) -> Forward:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = prepare(transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval())

    @torch.inference_mode()
    def forward(batch: Batch) -> np.ndarray:
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        return model(**tensors).last_hidden_state.float().numpy()

    return forward


def _load_onnxruntime(folder: Path, dtype: str, threads: int) -> Forward:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(["last_hidden_state"], batch)[0]


def _load_openvino(folder: Path, dtype: str, threads: int) -> Forward:
    return _openvino_forward(folder / "model.xml", dtype, threads)


def _load_openvino_int8(folder: Path, dtype: str, threads: int) -> Forward:
    return _openvino_forward(folder / "int8.xml", dtype, threads)


def _openvino_forward(file: Path, dtype: str, threads: int) -> Forward:
    import openvino

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" else "f32",
    }
    model = openvino.Core().compile_model(file, "CPU", options)
    return lambda batch: model(batch)["last_hidden_state"]


OPENVINO_INT8 = "OpenVINO int8"
RUNTIMES: dict[str, Load] = {
    "transformers": _load_transformers,
    "onnxruntime": _load_onnxruntime,
    "OpenVINO": _load_openvino,
    "hf_ctxmodels": _load_model,
    "hf_ctxmodels, prepared": _load_prepared,
    OPENVINO_INT8: _load_openvino_int8,
    "hf_ctxmodels int8": _load_int8,
}


def installed_runtimes() -> list[str]:
    """Names of the runtimes to measure: all, except for OpenVINO int8 if nncf is not installed."""
    return [name for name in RUNTIMES if name != OPENVINO_INT8 or find_spec("nncf") is not None]


class RuntimeProcess:
    """A process with one runtime, which runs batches when it is told to."""

    def __init__(self, runtime: str, folder: Path, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, connection = context.Pipe()
        arguments = (connection, RUNTIMES[runtime], folder, dtype, threads)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        connection.close()

    def run(self, batches: Sequence[Batch]) -> tuple[float, float, np.ndarray]:
        """Seconds and CPU seconds of all batches, and the states of the first one."""
        self._connection.send(batches)
        return self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, load: Load, folder: Path, dtype: str, threads: int) -> None:
    forward = load(folder, dtype, threads)
    while True:
        try:
            batches = connection.recv()
        except EOFError:
            return
        start, cpu_start = time.perf_counter(), time.process_time()
        states = [forward(batch) for batch in batches]
        connection.send((time.perf_counter() - start, time.process_time() - cpu_start, states[0]))
