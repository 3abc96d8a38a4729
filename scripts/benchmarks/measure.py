"""Time and peak memory of steps that are interleaved in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from benchmarks.settings import Settings
from hf_ctxmodels.layers.cpu.linear import fast_linear

Step = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one step.

    Attributes:
        seconds: Median over the repeats.
        cpu_seconds: CPU time of all threads, median over the repeats.
        spread: Interquartile range of the seconds divided by their median.
        peak_bytes: Peak memory of the step minus the memory allocated before it (weights, optimizer state).
    """

    seconds: float
    cpu_seconds: float
    spread: float
    peak_bytes: int

    @classmethod
    def summarize(cls, times: Sequence[tuple[float, float]], peak: int = 0) -> Self:
        """Summarize (wall-clock seconds, CPU seconds) of several runs."""
        seconds, cpu_seconds = zip(*times, strict=True)
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4) if len(times) > 1 else [median] * 3
        return cls(median, statistics.median(cpu_seconds), (high - low) / median, peak)


def measure(steps: Mapping[str, Step], settings: Settings) -> dict[str, Measurement]:
    """Interleave the steps, `settings.repeats` times after a warm-up, so that drift of the machine affects all of them
    equally.

    Args:
        steps: Steps by name.
        settings: Number of timed runs of each step, and their device.
    """
    device = settings.torch_device
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    for _ in range(settings.repeats):
        for name, step in steps.items():
            _synchronize(device)
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            _synchronize(device)
            times[name].append((time.perf_counter() - start, time.process_time() - cpu_start))
    return {name: Measurement.summarize(times[name], peaks[name]) for name in steps}


def peak_bytes(step: Step, device: torch.device) -> int:
    """Peak memory of one run of `step`, minus the memory allocated before it."""
    step()  # allocates optimizer moments and caches, which are not part of a step
    if device.type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    allocated = peak = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 9) -> float:
    """Floating-point operations per second of a square matrix product, an upper bound for a model on this machine."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        fast_linear(left, right)  # the fastest matrix product available
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
