"""Suite `vocabulary-loss`: the cross-entropy of a linear output layer, compared with torch's `linear_cross_entropy`
and, on a GPU with liger-kernel, with `liger_fused_linear_cross_entropy`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import is_liger_kernel_available

from benchmarks.measure import Measurement, measure
from benchmarks.settings import Settings
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy

SHAPES = ((600, 256, 30_522), (4096, 256, 30_522), (1024, 768, 50_257))
"""Targets, width and vocabulary of the cases: masked LM of 32 x 128 tokens, all of these tokens, and GPT-2's layer."""
SETTING = (
    "summed cross-entropy over the vocabulary and its gradients: `torch.nn.functional.linear_cross_entropy` with "
    "(`chunked`) and without `LinearCrossEntropyOptions`, `liger_fused_linear_cross_entropy` (on a GPU with "
    "liger-kernel), and `chunked_cross_entropy` of this package, whose speed relative to the others is in parentheses; "
    "difference: relative difference from torch's loss without chunks."
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
        if not settings.select_row(str(targets)):
            continue
        torch.manual_seed(0)
        hidden_states = torch.randn(targets, width, device=device, requires_grad=True)
        weight = (0.02 * torch.randn(vocab_size, width, device=device)).requires_grad_()
        bias = torch.zeros(vocab_size, device=device, requires_grad=True)
        ids = torch.randint(vocab_size, (targets,), device=device)
        inputs = hidden_states, weight, bias, ids, settings
        steps: dict[str, Callable[[], Tensor]] = {
            "hf_ctxmodels": partial(_step, *inputs),
            "torch": partial(_torch_step, *inputs, None),
            "torch, chunked": partial(_torch_step, *inputs, nn.LinearCrossEntropyOptions()),
        }
        if device.type == "cuda" and is_liger_kernel_available():
            steps["liger-kernel"] = partial(_liger_step, *inputs)
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


def _liger_step(hidden_states: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, settings: Settings) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    with settings.autocast():
        loss = liger_fused_linear_cross_entropy(hidden_states, weight, ids, bias=bias, reduction="sum")
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
    names = list(results[0].measurements)
    titles = ["targets", "width", "vocabulary", *names, *(f"memory: {name}" for name in names), "difference"]
    return "\n".join([f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *map(_row, results)])


def _row(result: Result) -> str:
    measurements = list(result.measurements.values())
    package, *others = measurements
    times = [f"{item.seconds * 1e3:.0f} ms ± {item.spread / 2:.0%}" for item in measurements]
    cells = [
        *(f"{size:,}" for size in result.shape),
        times[0],
        *(f"{time} ({item.seconds / package.seconds:.2f}x)" for time, item in zip(times[1:], others, strict=True)),
        *(f"{item.peak_bytes / 2**20:.0f} MiB" for item in measurements),
        f"{result.difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"
