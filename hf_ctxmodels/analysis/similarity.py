"""Similarity of the representations of words in any two layers of any two models.

The measures compare (n, d1) and (n, d2) vectors of the same n words. All are invariant to scale and translation, the
first two also to rotation:

* **debiased linear CKA** (Kornblith et al. 2019, arXiv 1905.00414, with the unbiased estimator of HSIC of Song et al.
  2012): independent representations have the expectation 0, where plain CKA grows with d / n;
* **SVCCA** (Raghu et al. 2017, arXiv 1706.05806): the mean canonical correlation of the principal components that
  explain 99% of the variance;
* **neuron-wise maximum correlation** (Bau et al. 2019; Wu et al. 2020, arXiv 2005.01172, `maxcorr`): the mean over the
  neurons of one layer of the largest absolute correlation with a neuron of the other layer.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ctxmodels.analysis.senses import Occurrence, encode_occurrences
from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError

_MAX_BLOCK = 2**25  # entries of Gram matrices in memory at the same time
_EPSILON = 1e-10  # smallest eigenvalue of a covariance, relative to the largest one


def linear_cka(x: Tensor, y: Tensor, *, debiased: bool = True) -> float:
    """Linear CKA of (n, d1) and (n, d2) representations, in feature space: the cost is O(n d1 d2).

    Args:
        x, y: Representations of the same n > 3 examples.
        debiased: Use the unbiased estimator of HSIC.
    """
    _check_examples([x, y])
    x, y = (_center(to_float64(representation)) for representation in (x, y))

    def hsic(a: Tensor, b: Tensor) -> Tensor:
        product = (b.T @ a).square().sum()
        if not debiased:
            return product
        n, a_norms, b_norms = len(a), a.square().sum(1), b.square().sum(1)
        return product - n / (n - 2) * (a_norms @ b_norms) + a_norms.sum() * b_norms.sum() / ((n - 1) * (n - 2))

    return float(hsic(x, y) / (hsic(x, x).sqrt() * hsic(y, y).sqrt()))


def cka_matrix(representations: Sequence[Tensor]) -> Tensor:
    """(layers, layers) debiased linear CKA of all pairs, from Gram matrices.

    All examples enter in one estimate, without minibatches: blocks of rows of the n x n Gram matrices of all layers are
    multiplied with one another. The cost is O(n d) per pair of examples and layer, and O(n n) per pair of layers,
    independent of the widths.

    Args:
        representations: (n, d) representations of the same n > 3 examples, of any widths.
    """
    n = _check_examples(representations)
    # without the diagonal, the rows of the Gram matrix of centered examples sum to the negative of the diagonal
    centered = [_center(representation) for representation in representations]
    scaled = [x / x.norm().clamp(min=torch.finfo(x.dtype).tiny) for x in centered]
    norms = [x.square().sum(1) for x in scaled]
    shifts = [squares / (n - 2) - squares.sum() / (2 * (n - 1) * (n - 2)) for squares in norms]
    hsic = torch.zeros(len(scaled), len(scaled), dtype=torch.float64)
    block_size = max(1, _MAX_BLOCK // (n * len(scaled)))
    for start in range(0, n, block_size):
        rows = slice(start, start + block_size)
        blocks = []
        for x, shift in zip(scaled, shifts):
            block = (x[rows] @ x.T).add_(shift[rows, None]).add_(shift)
            block.diagonal(start).zero_()
            blocks.append(block.flatten())
        stacked = torch.stack(blocks)
        hsic += (stacked @ stacked.T).cpu().double()
    scales = hsic.diagonal().sqrt()  # NaN or 0 for constant representations
    return hsic / (scales[:, None] * scales)


def svcca_matrix(representations: Sequence[Tensor], variance: float = 0.99) -> Tensor:
    """(layers, layers) SVCCA of all pairs: mean canonical correlation of the principal components.

    Args:
        representations: (n, d) representations of the same n examples, of any widths.
        variance: Fraction of the variance that the components of each representation explain; 1 is plain CCA.

    Raises:
        CtxError: There are at most as many examples as components of two representations, so that the correlations
            would be 1 for any data.
    """
    n = _check_examples(representations)
    bases = []
    for representation in representations:
        x = _center(to_float64(representation))
        eigenvalues, directions = torch.linalg.eigh(x.T @ x)
        eigenvalues, directions = eigenvalues.flip(0), directions.flip(1)
        rank = int((eigenvalues > _EPSILON * eigenvalues[0]).sum())
        explained = eigenvalues.cumsum(0) / eigenvalues.clamp(min=0).sum()
        size = min(rank, int((explained < variance - _EPSILON).sum()) + 1)
        bases.append(x @ directions[:, :size] / eigenvalues[:size].sqrt())
    largest = sorted(basis.shape[1] for basis in bases)[-2:]
    if n <= sum(largest):
        raise CtxError(
            f"{n} words do not suffice for the CCA of representations with {largest[0]} and {largest[-1]} components.",
            hint=f"use at least {4 * sum(largest):,} words, or another measure.",
        )
    matrix = torch.eye(len(bases), dtype=torch.float64, device=bases[0].device)
    for i, first in enumerate(bases):
        for j, second in enumerate(bases[:i]):
            correlations = torch.linalg.svdvals(first.T @ second)
            matrix[i, j] = matrix[j, i] = correlations.clamp(max=1).mean()
    return matrix


def neuron_matrix(representations: Sequence[Tensor]) -> Tensor:
    """(layers, layers) neuron-wise maximum correlation of all pairs; not symmetric: the mean is over the neurons of the
    layer of the row. Neurons that are constant, as the padding of narrow layers, are left out; NaN if all are.

    Args:
        representations: (n, d) representations of the same n examples, of any widths.
    """
    _check_examples(representations)
    unit_columns = []
    for representation in representations:
        x = _center(representation)
        lengths = x.norm(dim=0)
        is_active = lengths > 1e-6 * lengths.max()
        unit_columns.append(x[:, is_active] / lengths[is_active])
    size = len(unit_columns)
    matrix = torch.full((size, size), torch.nan, dtype=torch.float64)
    for i, first in enumerate(unit_columns):
        for j, second in enumerate(unit_columns[: i + 1]):
            if first.shape[1] and second.shape[1]:
                correlations = (first.T @ second).abs().clamp(max=1)
                matrix[i, j] = correlations.amax(1).mean()
                matrix[j, i] = correlations.amax(0).mean()
    return matrix


def independent_correlation(words: int, neurons: int) -> float:
    """Median of the largest absolute correlation of a neuron with `neurons` independent normal ones; the square of a
    correlation has the distribution Beta(1/2, words / 2 - 1)."""
    from scipy.stats import beta  # slow to import

    return float(beta.ppf(0.5 ** (1 / neurons), 0.5, words / 2 - 1)) ** 0.5


MEASURES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "cka": cka_matrix,
    "svcca": svcca_matrix,
    "neurons": neuron_matrix,
}


@dataclass(frozen=True)
class LayerSimilarities:
    """Similarities of all layers of several models.

    Attributes:
        models, layers: For each row and column, the number of the model and of its layer (0: embeddings).
        words: Number of compared words, the smallest of the samples.
        neurons: Number of neurons of the widest layer.
        matrices: Measure -> (samples, rows, columns).
    """

    models: list[int]
    layers: list[int]
    words: int
    neurons: int
    matrices: dict[str, Tensor]


def compare_layers(
    encoders: Iterable[WordEncoder],
    sentences: Sequence[Sentence],
    *,
    measures: Sequence[str] = ("cka",),
    max_words: int = 2000,
    seeds: Sequence[int] = (0,),
) -> LayerSimilarities:
    """Compare all layers of several models on the same words in the same sentences.

    The tokenizers of the models may differ. Words are sampled without replacement, once for each seed; those without
    tokens in one of the models are left out of all.

    Args:
        encoders: Models with their tokenizers, which can be loaded one by one.
        sentences: Texts or lists of words.
        measures: Keys of `MEASURES`.
        max_words: Words per sample.
        seeds: Seeds of the samples.

    Raises:
        CtxError: Fewer than 4 words have tokens in all models, or as `svcca_matrix`.
    """
    words = [(number, word) for number, sentence in enumerate(sentences) for word in range(len(split_words(sentence)))]
    samples = [random.Random(seed).sample(words, min(max_words, len(words))) for seed in seeds]
    occurrences = [Occurrence(*pair, pair[1] + 1) for pair in sorted({pair for sample in samples for pair in sample})]
    rows = {occurrence[:2]: row for row, occurrence in enumerate(occurrences)}  # by sentence and word
    is_common = torch.ones(len(occurrences), dtype=torch.bool)
    states: list[Tensor] = []
    names: list[tuple[int, int]] = []  # model and layer of each row of the matrices
    for model, encoder in enumerate(encoders):
        names += [(model, layer) for layer in encoder.layers]
        vectors, has_tokens = encode_occurrences(encoder, sentences, occurrences)
        states.append(vectors)
        is_common &= has_tokens
    matrices: dict[str, list[Tensor]] = {measure: [] for measure in measures}
    sizes = []
    for sample in samples:
        selected = torch.tensor([rows[pair] for pair in sample], dtype=torch.long)
        selected = selected[is_common[selected]]
        sizes.append(len(selected))
        representations = [vectors[selected, layer] for vectors in states for layer in range(vectors.shape[1])]
        for measure in measures:
            matrices[measure].append(MEASURES[measure](representations).cpu())
    return LayerSimilarities(
        models=[model for model, _ in names],
        layers=[layer for _, layer in names],
        words=min(sizes),
        neurons=max(vectors.shape[2] for vectors in states),
        matrices={measure: torch.stack(samples) for measure, samples in matrices.items()},
    )


def _center(x: Tensor) -> Tensor:
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return x - x.mean(0)


def _check_examples(representations: Sequence[Tensor]) -> int:
    """Number of examples of all representations; raises CtxError if it differs, or is below 4."""
    sizes = {len(representation) for representation in representations}
    if len(sizes) != 1 or min(sizes) < 4:
        raise CtxError(
            f"Representations of {', '.join(map(str, sorted(sizes)))} words cannot be compared.",
            hint="use vectors of the same words, at least 4.",
        )
    return sizes.pop()
