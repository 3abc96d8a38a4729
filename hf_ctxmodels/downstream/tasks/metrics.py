"""Metrics of the fine-tuning tasks: scikit-learn's, SciPy's and seqeval's scores, ranking metrics, and SQuAD's.

Result keys follow the `evaluate` library. Packages are imported at the first use, which takes about a second.

>>> accuracy([0, 1, 1, 1], [0, 1, 1, 0])
0.75
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def metric_range(name: str, is_percentage: bool = False) -> str:
    """Range of a metric by its name, which may have a prefix, for tables; "" for a number of examples."""
    if name.endswith(("loss", "mse", "perplexity")):
        return "lower is better"
    if name.endswith("total"):
        return ""
    if is_percentage or "bleu" in name:
        return "0 to 100"
    return "-1 to 1" if re.search("pearson|spearman|matthews", name) else "0 to 1"


def range_note(*names: str) -> str:
    """A line with the ranges of metrics.

    >>> range_note("accuracy", "spearman")
    'range: accuracy 0 to 1, spearman -1 to 1'
    """
    return "range: " + ", ".join(f"{name} {metric_range(name)}" for name in names)


def accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """Share of predictions equal to their reference, 0 to 1."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def macro_f1(predictions: Sequence[int], references: Sequence[int], labels: Sequence[int] | None = None) -> float:
    """Mean F1 of `labels`, by default all labels, 0 to 1; a label that is never predicted has F1 0."""
    from sklearn.metrics import f1_score

    return float(f1_score(references, predictions, labels=labels, average="macro", zero_division=0))


def classification_scores(predictions: Sequence[int], references: Sequence[int], num_labels: int) -> dict[str, float]:
    """Accuracy, F1 of label 1 for two labels, macro F1, and the Matthews correlation (Gorodkin 2004), which is 0 if all
    predictions or references are equal."""
    from sklearn.metrics import matthews_corrcoef

    scores = {"accuracy": accuracy(predictions, references)}
    if num_labels == 2:
        scores["f1"] = macro_f1(predictions, references, [1])
    scores["f1_macro"] = macro_f1(predictions, references)
    is_constant = len(set(predictions)) == 1 or len(set(references)) == 1
    scores["matthews_correlation"] = 0.0 if is_constant else float(matthews_corrcoef(references, predictions))
    return scores


def multi_label_scores(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Scores of (examples, labels) bool: F1 of all assignments (`f1_micro`), the mean F1 of all labels (`f1_macro`), 0
    for a label without any assignment, and the share of examples without an error (`accuracy`)."""
    correct, assigned = (predictions & references).sum(0), predictions.sum(0) + references.sum(0)
    return {
        "f1_micro": float(2 * correct.sum() / max(assigned.sum(), 1)),
        "f1_macro": float((2 * correct / np.maximum(assigned, 1)).mean()),
        "accuracy": float((predictions == references).all(1).mean()),
    }


def pearson_correlation(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Pearson correlation, -1 to 1; nan if either side is constant."""
    from scipy.stats import pearsonr

    return math.nan if _has_constant(predictions, references) else float(pearsonr(predictions, references).statistic)


def spearman_correlation(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Spearman rank correlation, -1 to 1; nan if either side is constant."""
    from scipy.stats import spearmanr

    return math.nan if _has_constant(predictions, references) else float(spearmanr(predictions, references).statistic)


def _has_constant(*sequences: Sequence[float]) -> bool:
    return any(np.ptp(np.asarray(values, np.float64)) == 0 for values in sequences)


def regression_scores(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation, 0 for constant predictions and nan, and the mean squared error."""
    return {
        "pearsonr": float(np.nan_to_num(pearson_correlation(predictions, references))),
        "spearmanr": float(np.nan_to_num(spearman_correlation(predictions, references))),
        "mse": float(np.square(np.subtract(references, predictions, dtype=np.float64)).mean()),
    }


def ranking_scores(predictions: Sequence[Sequence[float]], references: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Mean reciprocal rank (`mrr`) of the best relevant candidate and share of first ranks (`accuracy_at_1`) over
    queries, for the scores of each query's candidates and whether they are relevant. Of equal scores, irrelevant
    candidates rank higher, also if scores are nan."""
    ranks = []
    for scores, relevance in zip(predictions, references, strict=True):
        best = max(score for score, is_relevant in zip(scores, relevance, strict=True) if is_relevant)
        ranks.append(1 + sum(not score < best for score, is_relevant in zip(scores, relevance) if not is_relevant))
    return {"mrr": sum(1 / rank for rank in ranks) / len(ranks), "accuracy_at_1": ranks.count(1) / len(ranks)}


def entity_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Micro-averaged `f1`, `precision` and `recall` of the entities of BIO tags (type and both ends, as in CoNLL-2003),
    and the tags' `accuracy`, by seqeval."""
    from seqeval.metrics import accuracy_score
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    sides = [list(references), list(predictions)]
    precision, recall, f1, _ = precision_recall_fscore_support(*sides, average="micro", zero_division=0)
    scores = {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy_score(*sides)}
    return {name: float(score) for name, score in scores.items()}


def proposition_arguments(tags: Sequence[str]) -> set[tuple[str, tuple[tuple[int, int], ...]]]:
    """The arguments of BIO tags: a label, and the first word and the word after the last of each part.

    A span `C-X` continues the argument X before it, or is an X if there is none (CoNLL-2005's srl-eval). A reference
    `R-X` is a separate argument. The predicate, `V`, is not an argument.
    """
    spans: list[tuple[str, int, int]] = []
    previous = "O"
    for index, tag in enumerate(tags):
        if tag != "O":
            is_continued = tag[0] == "I" and previous[2:] == tag[2:]
            start = spans.pop()[1] if is_continued else index
            spans.append((tag[2:], start, index + 1))
        previous = tag
    arguments: list[tuple[str, list[tuple[int, int]]]] = []
    latest: dict[str, list[tuple[int, int]]] = {}
    for label, start, end in spans:
        role = label.removeprefix("C-")
        if role != label and role in latest:
            latest[role].append((start, end))
        else:
            latest[role] = [(start, end)]
            arguments.append((role, latest[role]))
    return {(role, tuple(spans)) for role, spans in arguments if role != "V"}


def argument_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Micro-averaged `f1`, `precision` and `recall` of the `proposition_arguments` of BIO tags: role and all parts must
    be equal (Carreras & Marquez 2005, section 2)."""
    pairs = [
        (proposition_arguments(prediction), proposition_arguments(reference))
        for prediction, reference in zip(predictions, references, strict=True)
    ]
    correct = sum(len(prediction & reference) for prediction, reference in pairs)
    predicted, expected = (sum(map(len, sets)) for sets in zip(*pairs))
    precision, recall = correct / max(predicted, 1), correct / max(expected, 1)
    return {"f1": 2 * correct / max(predicted + expected, 1), "precision": precision, "recall": recall}


_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: the official script keeps “ ” and –
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normalized answer: lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_exact_match(prediction: str, answer: str) -> float:
    """1.0 if the normalized texts are equal, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def answer_f1(prediction: str, answer: str) -> float:
    """F1 of the two bags of normalized words, 0 to 1."""
    predicted_words, answer_words = normalize_answer(prediction).split(), normalize_answer(answer).split()
    shared = sum((Counter(predicted_words) & Counter(answer_words)).values())
    return 2 * shared / (len(predicted_words) + len(answer_words)) if shared else 0.0


def squad_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD 1.1 (Rajpurkar et al. 2016, section 6.1): `f1` and `exact_match` in percent, the best of a question's
    answers, averaged over questions."""
    pairs = list(zip(predictions, answers, strict=True))
    scores = {}
    for name, score in (("f1", answer_f1), ("exact_match", answer_exact_match)):
        scores[name] = 100 * sum(max(score(text, answer) for answer in texts) for text, texts in pairs) / len(pairs)
    return scores


def squad_v2_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD 2.0 (Rajpurkar et al. 2018, section 4): `exact` and `f1` in percent, and the number of questions `total`:
    of all, of answerable (`HasAns_`) and of unanswerable (`NoAns_`) questions, for which the prediction should be
    ""."""
    values: dict[str, list[float]] = {"exact": [], "f1": []}
    for prediction, texts in zip(predictions, answers, strict=True):
        # No prediction can equal an answer of articles and punctuation only, so it does not count as an answer.
        texts = [text for text in texts if normalize_answer(text)]
        values["exact"].append(max(answer_exact_match(prediction, text) for text in texts or [""]))
        is_empty = float(not normalize_answer(prediction))
        values["f1"].append(max((answer_f1(prediction, text) for text in texts), default=is_empty))
    subsets = {
        "": list(range(len(answers))),
        "HasAns_": [index for index, texts in enumerate(answers) if texts],
        "NoAns_": [index for index, texts in enumerate(answers) if not texts],
    }
    scores: dict[str, float] = {}
    for name in values:
        for prefix, indices in subsets.items():
            if indices:
                scores[f"{prefix}{name}"] = 100 * sum(values[name][index] for index in indices) / len(indices)
                scores[f"{prefix}total"] = len(indices)
    return scores
