"""Importance of attention heads: by gradients, by removal of the least important heads, by ablation of single heads
(Michel et al. 2019, arXiv 1905.10650)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.core.attention_heads import attention_layers
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.head_gates import DisabledMode, disabled_heads, install_gates

Importance = dict[str, Tensor]
"""Name of a layer -> (heads,) importance of its heads."""


def head_importance(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], normalize: bool = True) -> Importance:
    """Importance of each head: the mean over batches of |dL / dg|, where g = 1 is a gate on the head's context and L
    the loss (Michel et al. 2019, equation 2).

    Args:
        model: A model with a head, in evaluation mode: of this package, or of transformers if its output projections
            can be located.
        batches: Arguments of the model's forward, with targets, on its device. Batches of one example give the
            expectation over examples of the paper; in larger ones, gradients of opposite sign cancel.
        normalize: Divide by the L2 norm within each layer (section 4.1).

    Raises:
        CtxError: The model has no attention heads, or returns no loss; or there is no batch.
    """
    layers = attention_layers(model)
    device = next(model.parameters()).device
    gates = {name: torch.ones(len(layer.heads), device=device, requires_grad=True) for name, layer in layers.items()}
    totals = {name: torch.zeros(len(gate), device=device) for name, gate in gates.items()}
    count = 0
    with install_gates(model, gates), _without_weight_gradients(model), torch.enable_grad():
        for batch in batches:
            loss = getattr(model(**batch), "loss", None)
            if loss is None:
                raise CtxError(f"{type(model).__name__} returns no loss.", hint="pass targets, such as labels.")
            gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
            for name, gradient in zip(gates, gradients, strict=True):
                if gradient is not None:  # such as of an encoder that does not affect the loss
                    totals[name] += gradient.abs()
            count += 1
    if not count:
        raise CtxError("Importance needs at least one example.", hint="use a file with examples.")
    importance = {name: (total / count).cpu() for name, total in totals.items()}
    if normalize:
        importance = {name: values / values.norm().clamp(min=1e-20) for name, values in importance.items()}
    return importance


@contextmanager
def _without_weight_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Compute gradients with respect to activations only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@dataclass
class RemovalStep:
    """The score without the heads in `removed`, name of a layer -> numbers of its heads."""

    removed: dict[str, list[int]]
    score: float

    @property
    def num_removed(self) -> int:
        """Number of removed heads."""
        return sum(map(len, self.removed.values()))


def removal_curve(
    model: PreTrainedModel,
    score: Callable[[], float],
    importance: Callable[[], Importance],
    *,
    fraction: float = 0.1,
    mode: DisabledMode = "zero",
    steps: list[RemovalStep] | None = None,
) -> Iterator[RemovalStep]:
    """Disable the least important heads step by step, until none is left (Michel et al. 2019, section 4).

    Args:
        score: Score of the model in its current state.
        importance: Importance of the heads of the model in its current state, computed again after each step, since
            disabled heads change the importance of others.
        fraction: Fraction of all heads that each step disables, at least one head.
        steps: Steps of an earlier call to continue from, in order.

    Yields:
        The steps after `steps`, first the one without removed heads.
    """
    layers = attention_layers(model)
    total = sum(len(layer.heads) for layer in layers.values())
    size = max(1, round(fraction * total))
    if not steps:
        step = RemovalStep({}, score())
        yield step
    else:
        step = steps[-1]
    while step.num_removed < total:
        with disabled_heads(model, step.removed, mode):
            values = importance()
        remaining = [
            (float(values[name][index]), name, head)
            for name, layer in layers.items()
            for index, head in enumerate(layer.heads)
            if head not in step.removed.get(name, ())
        ]
        removed = {name: list(heads) for name, heads in step.removed.items()}
        for _, name, head in sorted(remaining)[:size]:
            removed.setdefault(name, []).append(head)
        with disabled_heads(model, removed, mode):
            step = RemovalStep({name: sorted(heads) for name, heads in removed.items()}, score())
        yield step


def single_head_scores(
    model: PreTrainedModel,
    score: Callable[[], float],
    mode: DisabledMode = "zero",
    scores: Mapping[str, list[float]] | None = None,
) -> Iterator[tuple[str, list[float]]]:
    """The score with each single head disabled, and with all heads of its layer (Kovaleva et al. 2019, section 4.6;
    Michel et al. 2019, section 3.2).

    Args:
        scores: Available results, name of a layer -> its scores, which are not computed again.

    Yields:
        The name of a layer, and the scores without each of its heads, then without the whole layer.
    """
    for name, layer in attention_layers(model).items():
        if scores is not None and name in scores:
            yield name, scores[name]
            continue
        values = []
        for heads in (*([head] for head in layer.heads), layer.heads):
            with disabled_heads(model, {name: heads}, mode):
                values.append(score())
        yield name, values
