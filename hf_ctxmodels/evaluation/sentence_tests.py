"""Tests of sentence vectors without fine-tuning, as in SentEval (Conneau & Kiela 2018, arXiv 1803.05449)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.downstream.tasks.base import get_texts
from hf_ctxmodels.downstream.tasks.metrics import pearson_correlation, spearman_correlation

Encode = Callable[[Sequence[str]], Tensor]
"""Function from sentences to their vectors (sentences, width)."""
Criterion = Literal["cosine", "margin"]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_HELD_OUT_FRACTION = 10  # one in 10 training examples is held out to choose the penalty
_MAX_SCORES = 2**24  # cosines in memory at the same time


@dataclass(frozen=True)
class SentenceSimilarity:
    """Correlation of predicted similarities with human ratings.

    Attributes:
        spearman: Rank correlation, -1 to 1; NaN for constant predictions.
        pearson: Linear correlation, -1 to 1; NaN for constant predictions.
        pairs: Number of test pairs.
    """

    spearman: float
    pearson: float
    pairs: int


@dataclass(frozen=True)
class Probe:
    """Accuracy of a linear classifier on sentence vectors.

    Attributes:
        accuracy: Accuracy on the test examples.
        majority: Accuracy of always predicting the most frequent training label.
        examples: Numbers of training and test examples.
        penalty: The chosen penalty.
    """

    accuracy: float
    majority: float
    examples: tuple[int, int]
    penalty: float


def similarity(encode: Encode, file: str, columns: Sequence[str]) -> SentenceSimilarity:
    """Correlate cosines with the human ratings of a table; raises CtxError if it cannot be read.

    Args:
        encode: Function that computes sentence vectors.
        file: Table for `data.table_files.read_table`.
        columns: Columns of the two sentences and the rating.
    """
    texts, ratings = _read_rated_pairs(file, columns)
    first, second = _encode_columns(encode, texts)
    return _correlation(F.cosine_similarity(first, second), ratings)


def relatedness(
    encode: Encode, train_file: str, test_file: str, columns: Sequence[str], seed: int = 0
) -> SentenceSimilarity:
    """Train and test a ridge regression on the features |u - v| and u * v of sentence pairs.

    Args:
        encode, train_file, test_file, columns: As in `similarity`.
        seed: Seed of the split that chooses the penalty.
    """
    train_texts, train_ratings = _read_rated_pairs(train_file, columns)
    test_texts, test_ratings = _read_rated_pairs(test_file, columns)
    features = pair_features(*_encode_columns(encode, train_texts))
    features, test_features = _standardize(features, pair_features(*_encode_columns(encode, test_texts)))
    targets = torch.tensor(train_ratings, dtype=features.dtype)
    held_out = _held_out_mask(len(targets), seed)
    errors = {}
    for penalty in RIDGE_PENALTIES:
        weight, bias = fit_ridge(features[~held_out], targets[~held_out], penalty)
        errors[penalty] = float((features[held_out] @ weight + bias - targets[held_out]).square().mean())
    weight, bias = fit_ridge(features, targets, min(errors, key=lambda penalty: errors[penalty]))
    return _correlation(test_features @ weight + bias, test_ratings)


def _read_rated_pairs(file: str, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], list[float]]:
    if len(columns) != 3:
        raise CtxError(
            f"Expected three columns, got {len(columns)}: {', '.join(columns)}.",
            location=file,
            hint="name the columns of two sentences and a rating.",
        )
    rows = read_table(file, columns)
    ratings = []
    for row in rows:
        try:
            ratings.append(float(row.values[columns[2]]))
        except (TypeError, ValueError) as error:
            raise CtxError(f"{row.values[columns[2]]!r} is not a number.", location=row.location) from error
    return [get_texts(row, columns[:2]) for row in rows], ratings


def _correlation(predictions: Tensor, ratings: list[float]) -> SentenceSimilarity:
    values = predictions.tolist()
    spearman, pearson = spearman_correlation(values, ratings), pearson_correlation(values, ratings)
    return SentenceSimilarity(spearman, pearson, len(ratings))


def classification(encode: Encode, train_file: str, test_file: str, columns: Sequence[str], seed: int = 0) -> Probe:
    """Train and test a logistic regression on the vectors of single sentences, or on |u - v| and u * v of pairs.

    Args:
        encode, train_file, test_file: As in `similarity`.
        columns: Columns of one or two sentences and the label.
        seed: Seed of the split that chooses the penalty.

    Raises:
        CtxError: A file cannot be read, or there is only one label.
    """
    if len(columns) not in (2, 3):
        raise CtxError(
            f"Expected two or three columns, got {len(columns)}: {', '.join(columns)}.",
            hint="name the columns of one or two sentences and the label.",
        )
    datasets = []
    for file in (train_file, test_file):
        rows = read_table(file, columns)
        vectors = _encode_columns(encode, [get_texts(row, columns[:-1]) for row in rows])
        datasets.append((pair_features(*vectors), [str(row.values[columns[-1]]) for row in rows]))
    return probe(*datasets[0], *datasets[1], seed=seed)


def _encode_columns(encode: Encode, texts: Sequence[tuple[str, ...]]) -> list[Tensor]:
    """(examples, width) float32 vectors of each column, on the CPU; equal sentences are encoded once."""
    sentences = list(dict.fromkeys(sentence for example in texts for sentence in example))
    vectors = encode(sentences).float().cpu()
    indices = {sentence: index for index, sentence in enumerate(sentences)}
    return [vectors[[indices[sentence] for sentence in column]] for column in zip(*texts, strict=True)]


def pair_features(first: Tensor, second: Tensor | None = None) -> Tensor:
    """Features of examples: (examples, width) vectors unchanged; for pairs (examples, 2 * width), |u - v| and u * v."""
    return first if second is None else torch.cat([(first - second).abs(), first * second], 1)


def probe(
    features: Tensor, labels: Sequence[str], test_features: Tensor, test_labels: Sequence[str], seed: int = 0
) -> Probe:
    """Train and test a logistic regression on standardized features; a tenth of the training examples chooses the
    penalty.

    Args:
        features, test_features: (examples, width).
        labels, test_labels: Label of each example.
        seed: Seed of the split that chooses the penalty.

    Raises:
        CtxError: There are fewer than two labels, or a test label is not in the training examples.
    """
    classes = sorted(set(labels))
    unseen = sorted(set(test_labels) - set(classes))
    if len(classes) < 2 or unseen:
        raise CtxError(
            f"The training labels are {classes}" + (f", but the test data has {unseen[0]!r}." if unseen else "."),
            hint="use training examples of at least two labels, including all labels of the test data.",
        )
    targets = torch.tensor([classes.index(label) for label in labels])
    test_targets = torch.tensor([classes.index(label) for label in test_labels])
    features, test_features = _standardize(features, test_features)
    held_out = _held_out_mask(len(features), seed)
    accuracies = {}
    for penalty in PENALTIES:
        classifier = fit_classifier(features[~held_out], targets[~held_out], len(classes), penalty)
        accuracies[penalty] = _accuracy(features[held_out], targets[held_out], *classifier)
    best_penalty = max(accuracies, key=lambda penalty: (accuracies[penalty], penalty))
    classifier = fit_classifier(features, targets, len(classes), best_penalty)
    majority = classes.index(Counter(labels).most_common(1)[0][0])
    return Probe(
        _accuracy(test_features, test_targets, *classifier),
        float((test_targets == majority).double().mean()),
        (len(labels), len(test_labels)),
        best_penalty,
    )


def _standardize(features: Tensor, test_features: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both, in float64, with the mean and standard deviation of the training features."""
    features = features.double()
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    return (features - mean) / deviation, (test_features.double() - mean) / deviation


def _held_out_mask(num_examples: int, seed: int) -> Tensor:
    """(examples,) True for the examples that choose the penalty."""
    mask = torch.zeros(num_examples, dtype=torch.bool)
    permutation = torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed))
    mask[permutation[: max(1, num_examples // _HELD_OUT_FRACTION)]] = True
    return mask


def fit_ridge(features: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight (width,) and bias () that minimize the mean squared error + penalty * |weight|^2."""
    mean, bias = features.mean(0), targets.mean()
    centered = features - mean
    gram = centered.T @ centered / len(centered)
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, centered.T @ (targets - bias) / len(centered))
    return weight, bias - mean @ weight


def fit_classifier(features: Tensor, targets: Tensor, num_classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight (classes, width) and bias (classes,) that minimize the cross-entropy + penalty / 2 * |weight|^2."""
    weight = torch.zeros(num_classes, features.shape[1], dtype=features.dtype, requires_grad=True)
    bias = torch.zeros(num_classes, dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(features @ weight.T + bias, targets) + penalty / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def _accuracy(features: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> float:
    return float(((features @ weight.T + bias).argmax(1) == targets).double().mean())


def retrieval(source: Tensor, target: Tensor, criterion: Criterion = "cosine", neighbours: int = 4) -> float:
    """Fraction of source sentences whose nearest target sentence is their translation.

    Args:
        source: (sentences, width) vectors.
        target: (sentences, width) vectors of the translations, in the same order.
        criterion: "cosine"; or "margin", the cosine divided by the mean cosine of both sentences with their nearest
            neighbours (Artetxe & Schwenk 2019b, arXiv 1811.01136, equation 2, ratio).
        neighbours: Number of neighbours for the margin.

    Raises:
        CtxError: The numbers of source and target sentences differ, or are 0.
    """
    if len(source) != len(target) or not len(source):
        raise CtxError(
            f"Got {len(source)} sentences and {len(target)} translations.", hint="provide one translation per sentence."
        )
    source, target = F.normalize(source.float(), dim=1), F.normalize(target.float(), dim=1)
    chunk_size = max(1, _MAX_SCORES // len(target))
    neighbours = min(neighbours, len(target))
    source_density = _mean_neighbour_cosine(source, target, neighbours, chunk_size)
    target_density = _mean_neighbour_cosine(target, source, neighbours, chunk_size)
    correct = 0
    for first in range(0, len(source), chunk_size):
        scores = source[first : first + chunk_size] @ target.T
        if criterion == "margin":
            scores = scores / ((source_density[first : first + chunk_size, None] + target_density) / 2)
        translations = torch.arange(first, first + len(scores), device=scores.device)
        correct += int((scores.argmax(1) == translations).sum())
    return correct / len(source)


def _mean_neighbour_cosine(source: Tensor, target: Tensor, neighbours: int, chunk_size: int) -> Tensor:
    """(sources,) mean cosine with the nearest neighbours."""
    return torch.cat([(chunk @ target.T).topk(neighbours, dim=1).values.mean(1) for chunk in source.split(chunk_size)])
