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
from hf_ctxmodels.downstream.tasks.metrics import pearsonr, spearmanr

Encode = Callable[[Sequence[str]], Tensor]
"""Sentences -> (sentences, width)."""
Criterion = Literal["cosine", "margin"]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_HELD_OUT = 10  # one of every 10 training examples is held out to choose the penalty
_SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class SentenceSimilarity:
    """Correlation of predicted similarities with human judgements.

    Attributes:
        spearman, pearson: -1 to 1; NaN for constant predictions.
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
    """Correlation of cosines with the judgements of a table.

    Args:
        encode: Function of the vectors.
        file: A table for `data.table_files.read_table`.
        columns: Columns of the two sentences and of the judgement.

    Raises:
        CtxError: The file cannot be read.
    """
    texts, scores = _judged_pairs(file, columns)
    first, second = _encode_columns(encode, texts)
    return _correlation(F.cosine_similarity(first, second), scores)


def relatedness(
    encode: Encode, train_file: str, test_file: str, columns: Sequence[str], seed: int = 0
) -> SentenceSimilarity:
    """Train and test a ridge regression on |u - v| and u * v of two texts.

    Args:
        encode, columns: See `similarity`.
        train_file, test_file: Tables for `data.table_files.read_table`.
        seed: Seed of the training examples that are held out to choose the penalty.

    Raises:
        CtxError: A file cannot be read.
    """
    sides = [_judged_pairs(file, columns) for file in (train_file, test_file)]
    features, tested = _standardised(*(pair_features(*_encode_columns(encode, texts)) for texts, _ in sides))
    targets = torch.tensor(sides[0][1], dtype=features.dtype)
    held_out = _held_out(len(targets), seed)
    errors = {}
    for penalty in RIDGE_PENALTIES:
        weight, bias = fit_ridge(features[~held_out], targets[~held_out], penalty)
        errors[penalty] = float((features[held_out] @ weight + bias - targets[held_out]).square().mean())
    weight, bias = fit_ridge(features, targets, min(errors, key=lambda penalty: errors[penalty]))
    return _correlation(tested @ weight + bias, sides[1][1])


def _judged_pairs(file: str, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], list[float]]:
    """The pairs of a table, and their judgements."""
    if len(columns) != 3:
        raise CtxError(
            f"{len(columns)} columns: {', '.join(columns)}.",
            location=file,
            hint="give those of two texts and a number.",
        )
    rows = read_table(file, columns)
    scores = []
    for row in rows:
        try:
            scores.append(float(row.values[columns[2]]))
        except (TypeError, ValueError) as error:
            raise CtxError(f"{row.values[columns[2]]!r} is not a number.", location=row.where) from error
    return [get_texts(row, columns[:2]) for row in rows], scores


def _correlation(predictions: Tensor, scores: list[float]) -> SentenceSimilarity:
    sides = {"predictions": predictions.tolist(), "references": scores}
    return SentenceSimilarity(spearmanr(**sides)["spearmanr"], pearsonr(**sides)["pearsonr"], len(scores))


def classification(encode: Encode, train_file: str, test_file: str, columns: Sequence[str], seed: int = 0) -> Probe:
    """Train and test a logistic regression on vectors of single texts, or on |u - v| and u * v of two.

    Args:
        encode: Function of the vectors.
        train_file, test_file: Tables for `data.table_files.read_table`.
        columns: Columns of one or two texts, and of the label.
        seed: See `relatedness`.

    Raises:
        CtxError: A file cannot be read, or there is only one label.
    """
    if len(columns) not in (2, 3):
        raise CtxError(
            f"{len(columns)} columns: {', '.join(columns)}.", hint="give those of one or two texts and of the label."
        )
    parts = []
    for file in (train_file, test_file):
        rows = read_table(file, columns)
        vectors = _encode_columns(encode, [get_texts(row, columns[:-1]) for row in rows])
        parts.append((pair_features(*vectors), [str(row.values[columns[-1]]) for row in rows]))
    return probe(*parts[0], *parts[1], seed=seed)


def _encode_columns(encode: Encode, texts: Sequence[tuple[str, ...]]) -> list[Tensor]:
    """The float32 (rows, width) vectors of every column, on the CPU; equal texts are encoded once."""
    different = list(dict.fromkeys(text for row in texts for text in row))
    vectors = encode(different).float().cpu()
    places = {text: number for number, text in enumerate(different)}
    return [vectors[[places[text] for text in column]] for column in zip(*texts, strict=True)]


def pair_features(first: Tensor, second: Tensor | None = None) -> Tensor:
    """(rows, width) vectors of single texts, unchanged; of two texts, (rows, 2 * width) |u - v| and u * v."""
    return first if second is None else torch.cat([(first - second).abs(), first * second], 1)


def probe(
    features: Tensor, labels: Sequence[str], test_features: Tensor, test_labels: Sequence[str], seed: int = 0
) -> Probe:
    """Logistic regression on standardised features; the penalty is chosen on a tenth of the training examples.

    Raises:
        CtxError: There are fewer than two labels, or the training examples lack one.
    """
    names = sorted(set(labels))
    unknown = sorted(set(test_labels) - set(names))
    if len(names) < 2 or unknown:
        raise CtxError(f"The training labels are {names}" + (f", but the test has {unknown[0]!r}." if unknown else "."))
    targets, test_targets = (torch.tensor([names.index(each) for each in side]) for side in (labels, test_labels))
    features, test_features = _standardised(features, test_features)
    held_out = _held_out(len(features), seed)
    scores = {}
    for penalty in PENALTIES:
        weights = fit_classifier(features[~held_out], targets[~held_out], len(names), penalty)
        scores[penalty] = _accuracy(features[held_out], targets[held_out], *weights)
    best = max(scores, key=lambda penalty: (scores[penalty], penalty))
    weights = fit_classifier(features, targets, len(names), best)
    majority = names.index(Counter(labels).most_common(1)[0][0])
    return Probe(
        _accuracy(test_features, test_targets, *weights),
        float((test_targets == majority).double().mean()),
        (len(labels), len(test_labels)),
        best,
    )


def _standardised(features: Tensor, test_features: Tensor) -> tuple[Tensor, Tensor]:
    """Both in double precision, scaled to a mean of 0 and a standard deviation of 1 of the first."""
    features = features.double()
    mean, spread = features.mean(0), features.std(0).clamp(min=1e-6)
    return (features - mean) / spread, (test_features.double() - mean) / spread


def _held_out(examples: int, seed: int) -> Tensor:
    """(examples,) True for held-out examples."""
    held_out = torch.zeros(examples, dtype=torch.bool)
    shuffled = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    held_out[shuffled[: max(1, examples // _HELD_OUT)]] = True
    return held_out


def fit_ridge(features: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight (width,) and bias () that minimise the mean squared error + penalty * |weight|^2."""
    mean, bias = features.mean(0), targets.mean()
    centred = features - mean
    gram = centred.T @ centred / len(centred)
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, centred.T @ (targets - bias) / len(centred))
    return weight, bias - mean @ weight


def fit_classifier(features: Tensor, targets: Tensor, classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights (classes, width) and bias (classes,) that minimise the cross-entropy + penalty / 2 * |weights|^2."""
    weight = torch.zeros(classes, features.shape[1], dtype=features.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(features @ weight.T + bias, targets) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def _accuracy(features: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> float:
    return float(((features @ weight.T + bias).argmax(1) == targets).double().mean())


def retrieval(source: Tensor, target: Tensor, criterion: Criterion = "cosine", neighbours: int = 4) -> float:
    """Share of rows of `source` whose nearest row of `target` is their translation, in the same row.

    Args:
        source, target: (sentences, width).
        criterion: "cosine"; or "margin", the cosine divided by the mean cosine of either side with its nearest
            neighbours (Artetxe & Schwenk 2019b, arXiv 1811.01136, equation 2, ratio).
        neighbours: Number of neighbours for the margin.

    Raises:
        CtxError: The numbers of sources and targets differ, or are 0.
    """
    if len(source) != len(target) or not len(source):
        raise CtxError(f"{len(source)} sentences and {len(target)} translations.", hint="give one for each.")
    source, target = (F.normalize(each.float(), dim=1) for each in (source, target))
    size = max(1, _SCORES_AT_ONCE // len(target))
    nearby = min(neighbours, len(target))
    about = [_nearness(*sides, nearby, size) for sides in ((source, target), (target, source))]
    right = 0
    for first in range(0, len(source), size):
        scores = source[first : first + size] @ target.T
        if criterion == "margin":
            scores = scores / ((about[0][first : first + size, None] + about[1]) / 2)
        right += int((scores.argmax(1) == torch.arange(first, first + len(scores), device=scores.device)).sum())
    return right / len(source)


def _nearness(source: Tensor, target: Tensor, neighbours: int, size: int) -> Tensor:
    """(sources,) the mean cosine of each row with its nearest neighbours."""
    return torch.cat([(part @ target.T).topk(neighbours, dim=1).values.mean(1) for part in source.split(size)])
