"""The suite `bands`: locally banded causal attention against dense attention (Brown et al. 2020, section 2.1)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Measurement, measure
from hf_ctxmodels.layers.attention.banded_attention import banded_attention
from hf_ctxmodels.layers.cpu.dropout import scaled_dot_product_attention

HEADS, HEAD_DIM, WINDOW = 12, 64, 256
# Length -> expected minimum of the time with a mask, and of the time of dense causal attention, over the band's.
EXPECTED: dict[int, tuple[float | None, float | None]] = {1024: (None, 1.0), 2048: (3.0, None)}
SETTING = (
    f"one layer's attention, {HEADS} heads of {HEAD_DIM}, one row, a band of {WINDOW}, forward and backward; the peers "
    "are `scaled_dot_product_attention` with a mask of the band, which gives the same, and causal over all tokens."
)
_HEADER = (
    "| tokens | band | dense with a mask | speed | expected | memory | dense causal | speed | expected | memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One line of the table: what the band costs at a length, and the two kinds of dense attention."""

    length: int
    band: Measurement
    mask: Measurement
    causal: Measurement


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Measure every length.

    Args:
        device, dtype: Where and in which precision.
        repeats: Timed runs of each.
        attention: Not used: the peers are functions of torch.
        only: Run the lengths in whose name, "T=2048", this text occurs.
    """
    for length in EXPECTED:
        if only is None or only in f"T={length}":
            torch.manual_seed(0)
            yield Result(length, **measure(steps(length, device, dtype), repeats, device))


def steps(length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of the three; each step gives the output (1, length, heads, head_dim)."""
    shape = (1, length, HEADS, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    hidden = (distance < 0) | (distance >= WINDOW)
    mask = torch.zeros(length, length, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))

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
    """Render results."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    cells = [f"{result.length:,}", _cost(result.band)]
    for peer, expected in zip((result.mask, result.causal), EXPECTED[result.length], strict=True):
        cells += [
            _cost(peer),
            f"{peer.seconds / result.band.seconds:.2f}x",
            "-" if expected is None else f"{expected:.2f}x",
            f"{result.band.peak_bytes / peer.peak_bytes:.2f}x",
        ]
    return f"| {' | '.join(cells)} |"


def _cost(each: Measurement) -> str:
    return f"{1e3 * each.seconds:.0f} ms ± {each.spread / 2:.0%}, {each.peak_bytes / 1e6:,.0f} MB"
