"""Alignment of the representations of two languages by an orthogonal map (Wu et al. 2019, arXiv 1911.01464, section 5;
Procrustes: Schönemann 1966).

The vectors of translated sentences, in two models or in one multilingual model, are mapped by an orthogonal map that is
fitted on some pairs and tested on others. Sentence vectors are the means of the vectors of their words.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.analysis.senses import encode_sentences
from hf_ctxmodels.analysis.similarity import linear_cka
from hf_ctxmodels.architectures.word_encoder import Sentence, WordEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.evaluation import retrieval


@dataclass(frozen=True)
class LayerAlignment:
    """How well the representations of two languages match, by layer of the first model.

    Attributes:
        layers: Pairs of layers of the two models, at the same relative depth.
        accuracy_unmapped, accuracy_mapped: (splits, layers) accuracy of the retrieval of test translations by cosine,
            the mean of both directions, without and with the orthogonal map; `accuracy_unmapped` is NaN for layers of
            different widths.
        cka: (splits, layers) debiased linear CKA of the test pairs, which needs no map.
        train_pairs, test_pairs: Numbers of pairs of each split.
    """

    layers: list[tuple[int, int]]
    accuracy_unmapped: Tensor
    accuracy_mapped: Tensor
    cka: Tensor
    train_pairs: int
    test_pairs: int


def orthogonal_map(x: Tensor, y: Tensor) -> Tensor:
    """The (d1, d2) matrix W with orthonormal rows or columns that maximizes the inner products of x W and y, which for
    equal widths minimizes |x W - y|; for (n, d1) and (n, d2) vectors of translations."""
    left, _, right = torch.linalg.svd(x.T @ y, full_matrices=False)
    return left @ right


def align_languages(
    first: WordEncoder,
    second: WordEncoder,
    pairs: Sequence[tuple[Sentence, Sentence]],
    *,
    train_pairs: int = 2000,
    test_pairs: int = 1000,
    seeds: Sequence[int] = (0,),
) -> LayerAlignment:
    """Align the sentence vectors of two languages layer by layer.

    Vectors are centered by the means of the training pairs of their language, and scaled to length 1.

    Args:
        first, second: Models with their tokenizers, which can be the same.
        pairs: Sentences and their translations.
        train_pairs, test_pairs: Numbers of training and test pairs; with fewer pairs, at most a third are test pairs.
        seeds: Seeds of the splits.

    Raises:
        CtxError: There are fewer than 12 pairs with tokens in both models.
    """
    size = train_pairs + test_pairs
    if len(pairs) > size:
        pairs = random.Random(0).sample(list(pairs), size)
    x, has_x = encode_sentences(first, [sentence for sentence, _ in pairs])
    y, has_y = encode_sentences(second, [translation for _, translation in pairs])
    x, y = x[has_x & has_y], y[has_x & has_y]
    if len(x) < 12:
        raise CtxError(f"{len(x)} pairs do not suffice for an alignment.", hint="use at least 12, better thousands.")
    test_size = test_pairs if len(x) == size else min(test_pairs, len(x) // 3)
    train_size = min(train_pairs, len(x) - test_size)
    step = (len(second.layers) - 1) / max(1, len(first.layers) - 1)
    columns = [(column, round(column * step)) for column in range(len(first.layers))]
    scores = []
    for seed in seeds:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        test, train = order[:test_size], order[test_size : test_size + train_size]
        scores.append([_align_layers(x[:, i], y[:, j], train, test) for i, j in columns])
    accuracy_unmapped, accuracy_mapped, cka = torch.tensor(scores).unbind(-1)
    return LayerAlignment(
        layers=[(first.layers[i], second.layers[j]) for i, j in columns],
        accuracy_unmapped=accuracy_unmapped,
        accuracy_mapped=accuracy_mapped,
        cka=cka,
        train_pairs=train_size,
        test_pairs=test_size,
    )


def _align_layers(x: Tensor, y: Tensor, train: Tensor, test: Tensor) -> tuple[float, float, float]:
    """Accuracy without and with the orthogonal map, and CKA, for the vectors of one layer of both models."""
    x, y = (F.normalize(vectors - vectors[train].mean(0), dim=-1) for vectors in (x, y))
    weight = orthogonal_map(x[train], y[train])
    unmapped = _accuracy(x[test], y[test]) if x.shape[1] == y.shape[1] else float("nan")
    return unmapped, _accuracy(x[test] @ weight, y[test]), linear_cka(x[test], y[test])


def _accuracy(x: Tensor, y: Tensor) -> float:
    return (retrieval(x, y, "cosine") + retrieval(y, x, "cosine")) / 2
