"""Baselines of probes: control tasks, majorities and code lengths."""

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from hf_ctxmodels.analysis.probing.tasks import ExampleSet

Number = TypeVar("Number", float, Tensor)

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the sentences after which a new probe is trained (Voita & Titov 2020, section 2.2.2 and their code)."""


class ControlTask:
    """A random label for each word type, drawn from the distribution of the training labels (Hewitt & Liang 2019,
    section 2.1). A type has the same label in all splits, even if it does not occur in training.

    Args:
        labels: The labels of the training examples.
        seed: The seed of the labels.
    """

    def __init__(self, labels: Sequence[str], seed: int) -> None:
        counts = sorted(Counter(labels).items())
        self._labels = [label for label, _ in counts]
        self._totals = list(accumulate(count for _, count in counts))
        self._seed = seed

    def label(self, word_type: str) -> str:
        """The label of a word type."""
        position = random.Random(f"{self._seed} {word_type}").randrange(self._totals[-1])
        return self._labels[bisect_right(self._totals, position)]


def majority_predictions(train: ExampleSet, evaluation: ExampleSet, *, by_words: bool = True) -> list[tuple[str, ...]]:
    """Predict the most frequent training label of each example's words (or pair of words); for words that are not in
    the training examples, or all words with `by_words=False`, the most frequent label (Liu et al. 2019, section 3)."""
    counts: dict[Hashable, Counter[tuple[str, ...]]] = defaultdict(Counter)
    overall: Counter[tuple[str, ...]] = Counter()
    for example in train.examples:
        overall[example.labels] += 1
        if by_words:
            counts[train.span_words(example)][example.labels] += 1
    best = {words: _most_frequent(counter) for words, counter in counts.items()}
    default = _most_frequent(overall)
    if not by_words:
        return [default] * len(evaluation.examples)
    return [best.get(evaluation.span_words(example), default) for example in evaluation.examples]


def _most_frequent(counts: Counter[tuple[str, ...]]) -> tuple[str, ...]:
    """The most frequent labels; of equally frequent ones, the first by name."""
    return min(counts, key=lambda labels: (-counts[labels], labels))


def label_score(
    predictions: Sequence[tuple[str, ...]], references: Sequence[tuple[str, ...]], positive_label: str | None = None
) -> float:
    """Accuracy, or F1: of a positive label, or micro F1 of all labels where examples have several."""
    pairs = [(set(predicted), set(expected)) for predicted, expected in zip(predictions, references, strict=True)]
    if positive_label is not None:
        pairs = [(predicted & {positive_label}, expected & {positive_label}) for predicted, expected in pairs]
    correct = sum(len(predicted & expected) for predicted, expected in pairs)
    total = sum(len(predicted) + len(expected) for predicted, expected in pairs)
    return 2 * correct / max(total, 1)


def shuffle_sentences(examples: ExampleSet) -> tuple[list[int], list[int]]:
    """Order of the examples after a random permutation of their sentences, and the number of examples in each portion
    of the online code; portions that add no example are left out."""
    by_sentence: dict[int, list[int]] = defaultdict(list)
    for index, example in enumerate(examples.examples):
        by_sentence[example.sentence].append(index)
    sentences = sorted(by_sentence)
    random.Random(0).shuffle(sentences)
    totals = list(accumulate(len(by_sentence[sentence]) for sentence in sentences))
    sizes = sorted({totals[max(1, round(portion * len(sentences))) - 1] for portion in PORTIONS})
    return [index for sentence in sentences for index in by_sentence[sentence]], sizes


def online_code_length(first_size: int, num_labels: int, losses: Sequence[Number]) -> Number | float:
    """Bits of the online code: the first portion by a uniform code, each later one by the probe that was trained on all
    before it (Voita & Titov 2020, equation 3).

    `losses` are sums of cross-entropy in nats, numbers or tensors of equal shapes. The published code adds them to bits
    without conversion, so that its code lengths are smaller and not comparable.
    """
    return first_size * math.log2(num_labels) + sum(losses) / math.log(2)


def uniform_code_length(num_examples: int, num_labels: int) -> float:
    """Bits of the labels by a uniform code; divided by `online_code_length`, the compression."""
    return num_examples * math.log2(num_labels)
