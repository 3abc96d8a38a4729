"""Tests of sentence vectors without fine-tuning, as in SentEval (Conneau & Kiela 2018, arXiv 1803.05449)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice
from hf_ctxmodels.data.table_files import COLUMN_NAMES_HINT, parse_number, read_table
from hf_ctxmodels.downstream.tasks.base import get_texts, parse_label
from hf_ctxmodels.downstream.tasks.metrics import pearson_correlation, spearman_correlation
from hf_ctxmodels.evaluation.mining import ExactSearch, margin_scores

Encode = Callable[[Sequence[str]], Tensor]
"""Function from sentences to their vectors (sentences, width)."""
RatedPairs = tuple[list[tuple[str, ...]], list[float]]
"""Pairs of sentences, and their ratings."""
LabeledTexts = tuple[list[tuple[str, ...]], list[str]]
"""Single sentences or pairs, and their labels."""
Criterion = Literal["cosine", "margin"]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_HELD_OUT_DIVISOR = 10  # one in 10 training examples is held out to choose the penalty
_CELL_HINT = "correct the line, or name another column."
_MAX_SCORES = 2**24  # cosines in memory at the same time


@dataclass(frozen=True)
class SentenceSimilarity:
    """Rank and linear correlation of predictions with human ratings, -1 to 1 or NaN for constant predictions, and the
    number of test pairs."""

    spearman: float
    pearson: float
    pairs: int


@dataclass(frozen=True)
class Probe:
    """Accuracy of a linear classifier on sentence vectors.

    Attributes:
        accuracy, majority: Accuracy on the test examples, and of the most frequent training label.
        examples: Numbers of training and test examples.
        penalty: The chosen penalty.
    """

    accuracy: float
    majority: float
    examples: tuple[int, int]
    penalty: float


def similarity(encode: Encode, test: RatedPairs) -> SentenceSimilarity:
    """Correlate cosines with the ratings of `read_test_pairs`."""
    texts, ratings = test
    first, second = _encode_columns(encode, texts)
    return _correlation(F.cosine_similarity(first, second).tolist(), ratings)


def relatedness(encode: Encode, train: RatedPairs, test: RatedPairs, seed: int = 0) -> SentenceSimilarity:
    """Train and test a ridge regression on the features |u - v| and u * v of the sentence pairs of `read_rated_splits`;
    `seed` of the split that chooses the penalty."""
    from sklearn.linear_model import Ridge

    (train_texts, train_ratings), (test_texts, test_ratings) = train, test
    train_features, test_features = (
        pair_features(*_encode_columns(encode, texts)) for texts in (train_texts, test_texts)
    )
    features, scaled_test_features = _standardize(train_features, test_features)
    targets, held_out = np.array(train_ratings), _held_out_mask(len(train_ratings), seed)
    errors = {}
    for penalty in RIDGE_PENALTIES:  # of a mean over examples; scikit-learn's loss is a sum
        model = Ridge(penalty * (~held_out).sum()).fit(features[~held_out], targets[~held_out])
        errors[penalty] = float(np.square(model.predict(features[held_out]) - targets[held_out]).mean())
    best_penalty = min(errors, key=lambda penalty: errors[penalty])
    predictions = Ridge(best_penalty * len(targets)).fit(features, targets).predict(scaled_test_features)
    return _correlation(predictions.tolist(), test_ratings)


def read_rated_pairs(file: str, columns: Sequence[str]) -> RatedPairs:
    """The rated pairs of a table (`data.table_files.read_table`) with the `columns` of two sentences and a rating;
    raises CtxError for an invalid column."""
    if len(columns) != 3:
        raise CtxError(
            f"Expected three columns, got {len(columns)}: {', '.join(columns)}.",
            location=file,
            hint="name the columns of two sentences and a rating.",
        )
    rows = read_table(file, columns, column_hint=COLUMN_NAMES_HINT)
    ratings = []
    for row in rows:
        if (rating := parse_number(row.values[columns[2]])) is None:
            raise CtxError(
                f"{row.values[columns[2]]!r} is not a number.",
                location=row.location,
                hint=_CELL_HINT,
            )
        ratings.append(rating)
    return [get_texts(row, columns[:2], _CELL_HINT) for row in rows], ratings


def read_test_pairs(file: str, columns: Sequence[str]) -> RatedPairs:
    """Rated pairs as of `read_rated_pairs`; raises CtxError if all ratings are equal: no correlation is defined."""
    texts, ratings = read_rated_pairs(file, columns)
    if len(set(ratings)) < 2:
        raise CtxError(
            f"All ratings are {ratings[0]:g}; the correlation with equal ratings is undefined.",
            location=file,
            hint="use a file with at least two different ratings.",
        )
    return texts, ratings


def read_rated_splits(train_file: str, test_file: str, columns: Sequence[str]) -> tuple[RatedPairs, RatedPairs]:
    """Rated pairs as of `read_rated_pairs` of the training and the test file; raises CtxError for an invalid column, a
    single training pair, or equal ratings of all test pairs."""
    train_texts, train_ratings = read_rated_pairs(train_file, columns)
    if len(train_ratings) < 2:
        raise CtxError(
            "There is one training pair, and one is held out to choose the penalty.",
            location=train_file,
            hint="use a file with at least two pairs.",
        )
    return (train_texts, train_ratings), read_test_pairs(test_file, columns)


def _correlation(predictions: list[float], ratings: list[float]) -> SentenceSimilarity:
    spearman, pearson = spearman_correlation(predictions, ratings), pearson_correlation(predictions, ratings)
    return SentenceSimilarity(spearman, pearson, len(ratings))


def classification(encode: Encode, train: LabeledTexts, test: LabeledTexts, seed: int = 0) -> Probe:
    """Train and test a logistic regression on the vectors of the single sentences of `read_labeled_splits`, or on the
    absolute difference and the product of the vectors of pairs; `seed` of the split that chooses the penalty."""
    (train_texts, labels), (test_texts, test_labels) = train, test
    features, test_features = (pair_features(*_encode_columns(encode, texts)) for texts in (train_texts, test_texts))
    return probe(features, labels, test_features, test_labels, seed=seed)


def read_labeled_splits(train_file: str, test_file: str, columns: Sequence[str]) -> tuple[LabeledTexts, LabeledTexts]:
    """Single sentences or pairs, and their labels, of the training and the test file; `columns` are one or two
    sentences and the label. Raises CtxError for an invalid column, or labels that cannot be learned."""
    if len(columns) not in (2, 3):
        raise CtxError(
            f"Expected two or three columns, got {len(columns)}: {', '.join(columns)}.",
            location=train_file,
            hint="name the columns of one or two sentences and the label.",
        )
    train, test = (
        (
            [get_texts(row, columns[:-1], _CELL_HINT) for row in rows],
            [parse_label(row.values[columns[-1]], row.location, _CELL_HINT) for row in rows],
        )
        for rows in (read_table(file, columns, column_hint=COLUMN_NAMES_HINT) for file in (train_file, test_file))
    )
    _check_labels(train[1], test[1], f"{train_file}, {test_file}")
    return train, test


def _check_labels(labels: Sequence[str], test_labels: Sequence[str], location: str | None = None) -> None:
    """Raise CtxError if there are fewer than two labels, or a test label is not in the training examples."""
    classes = sorted(set(labels))
    unseen = sorted(set(test_labels) - set(classes))
    if len(classes) < 2 or unseen:
        raise CtxError(
            f"The training labels are {classes}" + (f", but the test data has {unseen[0]!r}." if unseen else "."),
            location=location,
            hint="use training examples of at least two labels, including all labels of the test data.",
        )


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
    """Train and test a logistic regression on standardized (examples, width) features; a tenth of the training
    examples, split by `seed`, chooses the penalty.

    Raises:
        CtxError: There are fewer than two labels, or a test label is not in the training examples.
    """
    _check_labels(labels, test_labels)
    scaled, scaled_test = _standardize(features, test_features)
    targets, held_out = np.array(labels), _held_out_mask(len(labels), seed)
    best_penalty = PENALTIES[-1]
    if len(set(targets[~held_out])) > 1:
        accuracies = {}
        for penalty in PENALTIES:
            classifier = _fit_classifier(scaled[~held_out], targets[~held_out], penalty)
            accuracies[penalty] = classifier.score(scaled[held_out], targets[held_out])
        best_penalty = max(accuracies, key=lambda penalty: (accuracies[penalty], penalty))
    accuracy = _fit_classifier(scaled, targets, best_penalty).score(scaled_test, np.array(test_labels))
    majority = Counter(labels).most_common(1)[0][0]
    majority_accuracy = sum(label == majority for label in test_labels) / len(test_labels)
    return Probe(float(accuracy), majority_accuracy, (len(labels), len(test_labels)), best_penalty)


def _fit_classifier(features: np.ndarray, targets: np.ndarray, penalty: float) -> Any:
    """Minimize the mean cross-entropy of the softmax + penalty / 2 * |weight|^2; scikit-learn's loss is a sum, and has
    one weight vector for two classes, whose penalty is half as large."""
    from sklearn.linear_model import LogisticRegression  # takes about a second

    num_vectors = 2 if len(set(targets)) == 2 else 1
    return LogisticRegression(C=num_vectors / (penalty * len(targets)), tol=1e-6, max_iter=1000).fit(features, targets)


def _standardize(features: Tensor, test_features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Scale both, in float64, with the mean and standard deviation of the training features."""
    features = features.double()
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    return ((features - mean) / deviation).numpy(), ((test_features.double() - mean) / deviation).numpy()


def _held_out_mask(num_examples: int, seed: int) -> np.ndarray:
    """(examples,) True for the examples that choose the penalty."""
    permutation = torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed)).numpy()
    return np.isin(np.arange(num_examples), permutation[: max(1, num_examples // _HELD_OUT_DIVISOR)])


def retrieval(source: Tensor, target: Tensor, criterion: Criterion = "cosine", neighbors: int = 4) -> float:
    """Fraction of source sentences whose nearest target sentence is their translation.

    Args:
        source, target: (sentences, width) vectors of sentences and of their translations, in the same order.
        criterion: "cosine"; or "margin", the cosine divided by the mean cosine of both sentences with their nearest
            neighbors (Artetxe & Schwenk 2019b, arXiv 1811.01136, equation 2, ratio).

    Raises:
        CtxError: The numbers of sentences differ or are 0, or the criterion is unknown.
    """
    check_choice(get_args(Criterion), criterion=criterion)
    if len(source) != len(target) or not len(source):
        raise CtxError(
            f"Got {len(source)} sentences and {len(target)} translations.", hint="provide one translation per sentence."
        )
    source, target = F.normalize(source.float(), dim=1), F.normalize(target.float(), dim=1)
    chunk_size = max(1, _MAX_SCORES // len(target))
    if criterion == "margin":
        search = ExactSearch()
        source_means, target_means = (
            search(*sides, neighbors)[0].mean(1) for sides in ((source, target), (target, source))
        )
    correct = 0
    for first in range(0, len(source), chunk_size):
        scores = source[first : first + chunk_size] @ target.T
        if criterion == "margin":
            scores = margin_scores(scores, source_means[first : first + chunk_size, None], target_means, "ratio")
        translations = torch.arange(first, first + len(scores), device=scores.device)
        correct += int((scores.argmax(1) == translations).sum())
    return correct / len(source)
