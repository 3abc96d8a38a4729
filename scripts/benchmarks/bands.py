"""Suite `bands`: locally banded causal attention against dense attention (Brown et al. 2020, section 2.1)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Measurement, measure
from benchmarks.settings import Settings
from hf_ctxmodels.layers.attention.backends import banded_attention
from hf_ctxmodels.layers.cpu.dropout import scaled_dot_product_attention

HEADS, HEAD_DIM, WINDOW = 12, 64, 256
# Length -> target speedups over attention with a band mask, and over dense causal attention.
TARGETS: dict[int, tuple[float | None, float | None]] = {1024: (None, 1.0), 2048: (3.0, None)}
SETTING = (
    f"attention of one layer, {HEADS} heads of {HEAD_DIM}, batch size 1, a band of {WINDOW}, forward and backward; the "
    "references are `scaled_dot_product_attention` with a band mask (equal output) and dense causal attention."
)
_HEADER = (
    "| tokens | banded | band mask | speedup | target | memory ratio "
    "| dense causal | speedup | target | memory ratio |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table: banded attention and the two references at one length."""

    length: int
    band: Measurement
    mask: Measurement
    causal: Measurement


def run(settings: Settings) -> Iterator[Result]:
    """Measure each length; the name of a row is, for example, "T=2048"."""
    for length in TARGETS:
        if settings.select_row(f"T={length}"):
            torch.manual_seed(0)
            yield Result(length, **measure(steps(length, settings.torch_device, settings.torch_dtype), settings))


def steps(length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward passes of the three implementations; they return (1, length, heads, head_dim)."""
    shape = (1, length, HEADS, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    is_masked = (distance < 0) | (distance >= WINDOW)
    mask = torch.zeros(length, length, device=device, dtype=dtype).masked_fill_(is_masked, float("-inf"))

    def step(attend: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run_step() -> Tensor:
            output = attend()
            output.float().sum().backward()
            return output.detach()

        return run_step

    return {
        "band": step(lambda: banded_attention(query, key, value, WINDOW, scale=HEAD_DIM**-0.5, dropout=0.0)),
        "mask": step(
            lambda: scaled_dot_product_attention(
                query, key, value, mask, is_causal=False, scale=HEAD_DIM**-0.5, dropout=0.0
            )
        ),
        "causal": step(
            lambda: scaled_dot_product_attention(
                query, key, value, None, is_causal=True, scale=HEAD_DIM**-0.5, dropout=0.0
            )
        ),
    }


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    cells = [f"{result.length:,}", _cost(result.band)]
    for reference, target in zip((result.mask, result.causal), TARGETS[result.length], strict=True):
        cells += [
            _cost(reference),
            f"{reference.seconds / result.band.seconds:.2f}x",
            "-" if target is None else f"≥ {target:.2f}x",
            f"{result.band.peak_bytes / reference.peak_bytes:.2f}x",
        ]
    return f"| {' | '.join(cells)} |"


def _cost(measurement: Measurement) -> str:
    return f"{1e3 * measurement.seconds:.0f} ms ± {measurement.spread / 2:.0%}, {measurement.peak_bytes / 1e6:,.0f} MB"
