"""Optimal low-rank factors of a weight, plain and weighted by the second moment of its inputs.

The best approximation of a weight W (out, in) of rank R for inputs X (in, samples) minimizes the Frobenius norm of
(W - W_R) X. With the second moment C = X X^T / samples it is W_R = U_R U_R^T W, where U_R are the first R left singular
vectors of W C^(1/2): the norm is proportional to the norm of (W - W_R) C^(1/2), whose minimum U_R U_R^T W C^(1/2) is
attained (Eckart and Young 1936). C need not be invertible. C = I is the truncated singular value decomposition of W.
The weighted form is in DRONE (Chen et al. 2021, "DRONE: Data-aware low-rank compression for large NLP models", section
3) and in SVD-LLM (Wang et al. 2024, arXiv 2403.07378, section 3.1), which uses a Cholesky root.

Embeddings E (tokens, width) are the case W = E^T with one-hot inputs: C is diagonal with the frequencies of the tokens,
as in the weighted approximation of GroupReduce (Chen et al. 2018, arXiv 1806.06950, section 3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.core.devices import to_float64

_ZERO = 1e-7  # singular values of float32 weights, relative to the largest, that are rounding errors


class Factors(NamedTuple):
    """Factors of a weight: `output @ input` approximates it.

    Attributes:
        output: (out, rank) with orthonormal columns.
        input: (rank, in).
        energy: Share of the squared singular values, of the weight or the weighted weight, that the factors keep.
    """

    output: Tensor
    input: Tensor
    energy: float


def factorize(weight: Tensor, moment: Tensor | None = None, *, rank: int | None = None, energy: float = 1.0) -> Factors:
    """Optimal factors of an (out, in) weight, see the module's docstring, computed in float64.

    Args:
        weight: (out, in).
        moment: (in, in) second moment of the inputs, or the (in,) diagonal of a diagonal one; None for the identity.
        rank: Number of singular values, at most min(out, in).
        energy: Without `rank`: the smallest rank whose singular values have this share of the sum of all squares.

    Returns:
        The factors in the dtype of `weight`.
    """
    values = to_float64(weight.detach())
    vectors, singular_values = _left_singular_vectors(values, moment)
    squares = singular_values.square()
    shares = squares.cumsum(0) / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
    if rank is None:
        rank = min(int((shares < energy * (1 - 1e-12)).sum()) + 1, len(shares))
    basis = vectors[:, :rank]
    remaining_energy = float(shares[rank - 1]) if float(squares.sum()) else 1.0
    return Factors(basis.to(weight), (basis.T @ values).to(weight), remaining_energy)


def _left_singular_vectors(weight: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Left singular vectors and values of W C^(1/2), (out, k) and (k,) with k = min(out, in).

    Vectors with singular values of zero are arbitrary. They are replaced by the left singular vectors of the residual
    of W, so that inputs that are not among the samples are approximated, too.
    """
    if moment is None:
        weighted = weight
    elif moment.dim() == 1:
        weighted = weight * moment.double().sqrt()
    else:
        eigenvalues, eigenvectors = torch.linalg.eigh(moment.double())
        weighted = weight @ (eigenvectors * eigenvalues.clamp(min=0).sqrt())
    vectors, values = _decompose(weighted)
    num_nonzero = int((values > _ZERO * values[0]).sum())
    if moment is not None and num_nonzero < len(values):
        vectors = vectors[:, :num_nonzero]
        complement, _ = _decompose(weight - vectors @ (vectors.T @ weight))
        vectors = torch.cat([vectors, complement[:, : len(values) - num_nonzero]], 1)
    return vectors, values


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and values of a (rows, columns) float64 matrix."""
    if len(matrix) >= matrix.shape[1]:
        vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
        return vectors, values
    squares, vectors = torch.linalg.eigh(matrix @ matrix.T)  # several times faster for embeddings
    return vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()


def max_rank(shape: tuple[int, ...]) -> int:
    """The largest rank at which factors of an (out, in) weight have fewer parameters than the weight."""
    rows, columns = shape
    return (rows * columns - 1) // (rows + columns)
