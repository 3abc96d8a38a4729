"""Suite `vocabulary-loss`: the cross-entropy of a linear output layer, compared with torch's `linear_cross_entropy`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Measurement, measure
from benchmarks.settings import Settings
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy

SHAPES = ((600, 256, 30_522), (4096, 256, 30_522), (1024, 768, 50_257))
"""Targets, width and vocabulary of the cases: masked LM of 32 x 128 tokens, all of these tokens, and GPT-2's layer."""
SETTING = (
    "summed cross-entropy over the vocabulary and its gradients: `torch.nn.functional.linear_cross_entropy` with "
    "(`chunked`) and without `LinearCrossEntropyOptions`, and `chunked_cross_entropy` of this package; difference: "
    "relative difference from torch's loss without chunks."
)
_HEADER = (
    "| targets | width | vocabulary | torch | torch, chunked | hf_ctxmodels | speed | to chunked | memory: torch | "
    "torch, chunked | hf_ctxmodels | difference |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table: the case, its measurements by implementation, and the relative difference of the losses."""

    shape: tuple[int, int, int]
    measurements: dict[str, Measurement]
    difference: float


def run(settings: Settings) -> Iterator[Result]:
    """Run each shape; its name is the number of targets."""
    device = settings.torch_device
    for targets, width, vocab_size in SHAPES:
        if not settings.selects(str(targets)):
            continue
        torch.manual_seed(0)
        hidden_states = torch.randn(targets, width, device=device, requires_grad=True)
        weight = (0.02 * torch.randn(vocab_size, width, device=device)).requires_grad_()
        bias = torch.zeros(vocab_size, device=device, requires_grad=True)
        ids = torch.randint(vocab_size, (targets,), device=device)
        inputs = hidden_states, weight, bias, ids, settings
        steps: dict[str, Callable[[], Tensor]] = {
            "torch": partial(_torch_step, *inputs, None),
            "chunked": partial(_torch_step, *inputs, nn.LinearCrossEntropyOptions()),
            "hf_ctxmodels": partial(_step, *inputs),
        }
        expected, actual = (float(steps[name]()) for name in ("torch", "hf_ctxmodels"))
        yield Result((targets, width, vocab_size), measure(steps, settings), abs(actual - expected) / abs(expected))


def _torch_step(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor,
    ids: Tensor,
    settings: Settings,
    options: nn.LinearCrossEntropyOptions | None,
) -> Tensor:
    with settings.autocast():
        loss = F.linear_cross_entropy(hidden_states, weight, ids, linear_bias=bias, reduction="sum", options=options)
    return _backward(loss, hidden_states, weight, bias)


def _step(hidden_states: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, settings: Settings) -> Tensor:
    with settings.autocast():
        loss = chunked_cross_entropy(hidden_states, weight, bias, ids)
    return _backward(loss, hidden_states, weight, bias)


def _backward(loss: Tensor, *leaves: Tensor) -> Tensor:
    torch.autograd.grad(loss, leaves)
    return loss.detach()


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    unchunked, chunked, ours = (result.measurements[name] for name in ("torch", "chunked", "hf_ctxmodels"))
    cells = [
        *(f"{size:,}" for size in result.shape),
        *(f"{item.seconds * 1e3:.0f} ms ± {item.spread / 2:.0%}" for item in (unchunked, chunked, ours)),
        f"{unchunked.seconds / ours.seconds:.2f}x",
        f"{chunked.seconds / ours.seconds:.2f}x",
        *(f"{item.peak_bytes / 2**20:.0f} MiB" for item in (unchunked, chunked, ours)),
        f"{result.difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"
