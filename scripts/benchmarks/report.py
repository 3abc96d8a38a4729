"""The Markdown table a benchmark writes."""

import math
import platform
from collections.abc import Sequence

import torch
import transformers

from benchmarks.encoders import Result

_HEADER = (
    "| family | work | peer | ours | speed | expected | peer's CPU time | our CPU time | peak memory | expected "
    "| difference | tokens/s | of matmul |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def describe_setting(device: torch.device, dtype: torch.dtype, repeats: int, busy: bool, what: str) -> str:
    """One line: machine, precision, versions, method.

    Args:
        device, dtype, repeats: As for the suites.
        busy: Whether a second process spins on one core.
        what: What a suite runs, and what its columns mean.
    """
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    load = "a second process spins on one core, " if busy else ""
    return (
        f"{machine}, {torch.get_num_threads()} threads, {load}{str(dtype)[6:]}, torch {torch.__version__}; medians of "
        f"{repeats} interleaved runs in one process, ± half the interquartile range; {what}"
    )


def describe_peer(attention: str) -> str:
    """What the suite `encoders` runs."""
    return (
        f"peer: transformers {transformers.__version__} with {attention}; CPU time is that of all threads; peak memory "
        "is what a step holds beyond weights and optimizer state; 'of matmul' is useful operations over the rate of a "
        "large matrix product here."
    )


def table(results: Sequence[Result]) -> str:
    """Render results; a missed expectation is set in bold."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    case, ours, peer = result.case, result.ours, result.peer
    time = _token_time if case.end_to_end else _step_time
    speed = peer.seconds / ours.seconds
    memory = ours.peak_bytes / peer.peak_bytes if peer.peak_bytes else math.nan
    cells = [
        case.family,
        case.name,
        f"{time(peer.seconds)} ± {peer.spread / 2:.0%}",
        f"{time(ours.seconds)} ± {ours.spread / 2:.0%}",
        _mark(f"{speed:.2f}x", case.speed is not None and speed < case.speed),
        "-" if case.speed is None else f"≥ {case.speed}x",
        time(peer.cpu_seconds),
        time(ours.cpu_seconds),
        _mark(_known(memory, ".2f", "x"), case.memory is not None and memory > case.memory),
        "-" if case.memory is None else f"≤ {case.memory}x",
        _known(result.difference, ".0e"),
        f"{result.tokens / ours.seconds:,.0f}",
        _known(result.utilisation, ".0%"),
    ]
    return f"| {' | '.join(cells)} |"


def _step_time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _token_time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs/token"


def _known(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


def _mark(text: str, missed: bool) -> str:
    return f"**{text} (missed)**" if missed else text
