"""Sensitivity of the loss to each layer, by the top eigenvalues of the Hessian (Q-BERT, Shen et al. 2019, arXiv
1909.05840, section 3.1), and the assignment of bits to layers."""

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
    """Eigenvalue of largest magnitude of the Hessian of a loss, by power iteration (Shen et al., algorithm 1).

    Args:
        loss: A twice differentiable scalar function of the parameters.
        parameters: The parameters of the Hessian block.
        iterations: Maximum number of Hessian-vector products.
        tolerance: Relative change between two estimates at which to stop.
        seed: Random seed of the first vector.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    vector = _normalised([torch.randn(p.shape, generator=generator).to(p) for p in parameters])
    eigenvalue = 0.0
    for _ in range(iterations):
        product = torch.autograd.grad(gradients, parameters, grad_outputs=vector, retain_graph=True)
        estimate = float(sum((left * right).sum() for left, right in zip(vector, product, strict=True)))
        has_converged = abs(estimate - eigenvalue) <= tolerance * abs(estimate)
        eigenvalue, vector = estimate, _normalised(product)
        if has_converged:
            break
    return eigenvalue


def _normalised(vector: Iterable[Tensor]) -> list[Tensor]:
    vector = [*vector]
    norm = torch.stack([values.square().sum() for values in vector]).sum().sqrt().clamp_min(1e-30)
    return [values / norm for values in vector]


def group_by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> names of its modules; modules outside of layers are dropped."""
    names_by_layer: dict[str, list[str]] = {}
    for name in names:
        if (match := _LAYER.match(name)) is not None:
            names_by_layer.setdefault(match[0], []).append(name)
    return names_by_layer


def layer_sensitivities(
    model: nn.Module, layers: Mapping[str, Sequence[str]], batches: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """abs(mean) + standard deviation of each layer's top eigenvalue over batches (Shen et al., equation 5).

    Args:
        model: A model with a twice differentiable loss: in evaluation mode, with eager attention.
        layers: Layer -> names of its linear layers.
        batches: One batch from each part of the data.
    """
    blocks = {layer: [_weight(model, name) for name in names] for layer, names in layers.items()}
    eigenvalues: dict[str, list[float]] = {layer: [] for layer in layers}
    for batch in batches:
        loss = model(**batch).loss
        for layer, parameters in blocks.items():
            eigenvalues[layer].append(top_eigenvalue(loss, parameters))
    return {layer: abs(statistics.mean(values)) + statistics.pstdev(values) for layer, values in eigenvalues.items()}


def _weight(model: nn.Module, name: str) -> Tensor:
    weight: Any = model.get_submodule(name).weight
    return weight


def assign_bits(sensitivity: Mapping[str, float], bits: Sequence[int]) -> dict[str, int]:
    """Layer -> bits: the most sensitive layers get the most bits; each number of bits has equally many layers.

    Args:
        sensitivity: Layer -> sensitivity.
        bits: Numbers of bits to assign.
    """
    ordered = sorted(sensitivity, key=lambda layer: -sensitivity[layer])
    descending_bits = sorted(bits, reverse=True)
    return {layer: descending_bits[rank * len(bits) // len(ordered)] for rank, layer in enumerate(ordered)}
