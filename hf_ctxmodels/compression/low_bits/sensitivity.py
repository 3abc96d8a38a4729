"""How sensitive a model's loss is to its layers: the top eigenvalues of the Hessian (Q-BERT, Shen et al. 2019, arXiv
1909.05840, section 3.1), and the bits that each layer gets by them."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LAYER = re.compile(r"^(?:.*\.)?layers\.\d+(?=\.)")


def top_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> float:
    """The eigenvalue of largest magnitude of the Hessian of a loss, by power iteration (Shen et al., algorithm 1).

    Args:
        loss: A scalar that depends on the parameters and is twice differentiable.
        parameters: The block of the Hessian.
        iterations: The most products with the Hessian.
        tolerance: Relative change between two estimates at which to stop.
        seed: Of the first vector.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    vector = _normalised([torch.randn(each.shape, generator=generator).to(each) for each in parameters])
    eigenvalue = 0.0
    for _ in range(iterations):
        product = torch.autograd.grad(gradients, parameters, grad_outputs=vector, retain_graph=True)
        estimate = float(sum((left * right).sum() for left, right in zip(vector, product, strict=True)))
        settled = abs(estimate - eigenvalue) <= tolerance * abs(estimate)
        eigenvalue, vector = estimate, _normalised(product)
        if settled:
            break
    return eigenvalue


def _normalised(vector: Iterable[Tensor]) -> list[Tensor]:
    vector = [*vector]
    length = torch.stack([each.square().sum() for each in vector]).sum().sqrt().clamp_min(1e-30)
    return [each / length for each in vector]


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> the modules that lie in it; what lies in none is left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (match := _LAYER.match(name)) is not None:
            found.setdefault(match[0], []).append(name)
    return found


def sensitivities(
    model: nn.Module, layers: Mapping[str, Sequence[str]], parts: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """abs(mean) + standard deviation of each layer's top eigenvalue over parts of the data (Shen et al., equation 5).

    Args:
        model: With a loss that is twice differentiable: in evaluation mode, with eager attention.
        layers: Layer -> paths of its linear maps.
        parts: Batches, one for each part of the data.
    """
    blocks = {layer: [_weight(model, name) for name in names] for layer, names in layers.items()}
    found: dict[str, list[float]] = {layer: [] for layer in layers}
    for part in parts:
        loss = model(**part).loss
        for layer, parameters in blocks.items():
            found[layer].append(top_eigenvalue(loss, parameters))
    return {layer: abs(statistics.mean(each)) + statistics.pstdev(each) for layer, each in found.items()}


def _weight(model: nn.Module, name: str) -> Tensor:
    weight: Any = model.get_submodule(name).weight
    return weight


def mix_bits(sensitivity: Mapping[str, float], bits: Sequence[int]) -> dict[str, int]:
    """Layer -> bits: the most sensitive layers get the most; each number of bits is that of as many layers.

    Args:
        sensitivity: Of each layer.
        bits: The numbers to be given.
    """
    ordered = sorted(sensitivity, key=lambda layer: -sensitivity[layer])
    widths = sorted(bits, reverse=True)
    return {layer: widths[place * len(widths) // len(ordered)] for place, layer in enumerate(ordered)}
