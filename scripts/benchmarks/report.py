"""Markdown table of the suites `encoders`, `decoders` and `seq2seq`."""

import math
import platform
import re
from collections.abc import Sequence

import torch
import transformers

from benchmarks.encoders import Result
from benchmarks.settings import Settings

_HEADER = (
    "| family | workload | reference | hf_ctxmodels | speedup | target | reference CPU time | hf_ctxmodels CPU time "
    "| peak memory ratio | target | max difference | tokens/s | fraction of matmul rate |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def describe_settings(settings: Settings, description: str) -> str:
    """Describe machine, precision, versions and method in one line.

    Args:
        settings: Settings of the run.
        description: Workloads and columns of the suite.
    """
    device = settings.torch_device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    load = "a second process occupies one core, " if settings.busy else ""
    return (
        f"{machine}, {torch.get_num_threads()} threads, {load}{settings.dtype}, torch {torch.__version__}; medians of "
        f"{settings.repeats} interleaved runs in one process, ± half the interquartile range; {description}"
    )


def describe_reference(attention: str) -> str:
    """Describe the reference and the columns of the table."""
    return (
        f"reference: transformers {transformers.__version__} with {attention}; CPU time is summed over threads; peak "
        "memory excludes weights and optimizer state; 'fraction of matmul rate' is the rate of useful operations "
        "divided by the rate of a large matrix product on this machine."
    )


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown; missed targets are bold."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def without_targets(table: str) -> str:
    """Remove the columns named "target" and the marks of missed targets from a Markdown table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    shown = [index for index, name in enumerate(rows[0]) if name != "target"]
    text = "\n".join(f"| {' | '.join(row[index] for index in shown)} |" for row in rows)
    return re.sub(r"\*\*(.*?) \(missed\)\*\*", r"\1", text)


def _row(result: Result) -> str:
    case, model, reference = result.case, result.model, result.reference
    format_time = _format_token_time if case.is_end_to_end else _format_step_time
    speedup = reference.seconds / model.seconds
    memory_ratio = model.peak_bytes / reference.peak_bytes if reference.peak_bytes else math.nan
    cells = [
        case.family,
        case.name,
        f"{format_time(reference.seconds)} ± {reference.spread / 2:.0%}",
        f"{format_time(model.seconds)} ± {model.spread / 2:.0%}",
        _mark_missed(f"{speedup:.2f}x", case.min_speedup is not None and speedup < case.min_speedup),
        "-" if case.min_speedup is None else f"≥ {case.min_speedup}x",
        format_time(reference.cpu_seconds),
        format_time(model.cpu_seconds),
        _mark_missed(
            _format_optional(memory_ratio, ".2f", "x"),
            case.max_memory_ratio is not None and memory_ratio > case.max_memory_ratio,
        ),
        "-" if case.max_memory_ratio is None else f"≤ {case.max_memory_ratio}x",
        _format_optional(result.difference, ".0e"),
        f"{result.tokens / model.seconds:,.0f}",
        _format_optional(result.utilization, ".0%"),
    ]
    return f"| {' | '.join(cells)} |"


def _format_step_time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _format_token_time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs/token"


def _format_optional(value: float, format_spec: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{format_spec}}{unit}"


def _mark_missed(text: str, missed: bool) -> str:
    return f"**{text} (missed)**" if missed else text
