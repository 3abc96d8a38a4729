"""Metrics of fine-tuning, with the names, arguments and result keys of the `evaluate` library, in NumPy.

`evaluate.load` downloads a script from the Hub and needs scikit-learn. The tests compare with scikit-learn, SciPy and
seqeval.

>>> accuracy(predictions=[0, 1, 1, 1], references=[0, 1, 1, 0])
{'accuracy': 0.75}

`METRICS` maps the names of `evaluate.load` to the functions.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Answer = Mapping[str, Any]  # {"id": str, "answers": {"text": list[str], "answer_start": list[int]}}
Prediction = Mapping[str, Any]  # {"id": str, "prediction_text": str, "no_answer_probability": float (SQuAD 2.0 only)}
Entity = tuple[int, int, str]  # first word, word after the last, type


def _check_lengths(predictions: Sequence, references: Sequence) -> None:
    """Raise ValueError unless there is a prediction for each reference, and at least one."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references; give one for each.")
    if len(references) == 0:
        raise ValueError("No predictions and no references; a metric needs at least one of each.")


def _ratio(numerator: float, denominator: float) -> float:
    """The quotient, 0.0 for 0 / 0."""
    return numerator / denominator if denominator else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Classification and regression
# ----------------------------------------------------------------------------------------------------------------------


def accuracy(*, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Share of predictions equal to their reference, 0 to 1."""
    _check_lengths(predictions, references)
    right = sum(predicted == expected for predicted, expected in zip(predictions, references))
    return {"accuracy": float(right / len(references))}


def ranking(*, predictions: Sequence[Sequence[float]], references: Sequence[Sequence[bool]]) -> dict[str, float]:
    """`mrr` and `accuracy_at_1` of scores of candidates, 0 to 1, means over the queries.

    They are the reciprocal of the best relevant candidate's rank, and whether that is 1. Of equal scores the relevant
    candidate has the lowest rank, so that equal scores for all earn nothing.

    Args:
        predictions: A query's scores, one for each candidate.
        references: Whether each is relevant; some of a query's are, some are not.
    """
    _check_lengths(predictions, references)
    ranks = []
    for scores, relevant in zip(predictions, references):
        best = max(score for score, own in zip(scores, relevant, strict=True) if own)
        ranks.append(1 + sum(score >= best for score, own in zip(scores, relevant, strict=True) if not own))
    count = len(ranks)
    return {"mrr": sum(1 / rank for rank in ranks) / count, "accuracy_at_1": ranks.count(1) / count}


def f1(
    *, predictions: Sequence[Any], references: Sequence[Any], average: str = "binary", pos_label: Any = 1
) -> dict[str, float]:
    """Harmonic mean of precision and recall, 0 to 1; 0 for a label that is never predicted.

    Args:
        predictions, references: Labels.
        average: "binary" for the score of `pos_label`; "macro" for the mean over all labels of predictions and
            references.
        pos_label: See `average`.
    """
    _check_lengths(predictions, references)
    if average not in ("binary", "macro"):
        raise ValueError(f"average={average!r}; expected 'binary' or 'macro'.")
    shared = Counter(predicted for predicted, expected in zip(predictions, references) if predicted == expected)
    size = Counter(predictions) + Counter(references)
    labels = [pos_label] if average == "binary" else list(size)
    return {"f1": sum(_ratio(2 * shared[label], size[label]) for label in labels) / len(labels)}


def matthews_correlation(*, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Matthews correlation of two labellings, -1 to 1, for any number of labels (Gorodkin 2004).

    0 when the predictions or the references are all of one label.
    """
    _check_lengths(predictions, references)
    total = len(references)
    right = sum(predicted == expected for predicted, expected in zip(predictions, references))
    predicted_counts, expected_counts = Counter(predictions), Counter(references)
    by_chance = sum(count * expected_counts[label] for label, count in predicted_counts.items())
    spread = [total**2 - sum(count**2 for count in counts.values()) for counts in (predicted_counts, expected_counts)]
    return {"matthews_correlation": float(_ratio(right * total - by_chance, math.sqrt(spread[0] * spread[1])))}


def pearsonr(*, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Linear correlation, -1 to 1; nan where either side is constant."""
    _check_lengths(predictions, references)
    return {"pearsonr": _correlation(np.asarray(predictions, np.float64), np.asarray(references, np.float64))}


def spearmanr(*, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Linear correlation of the ranks (equal numbers share their mean rank), -1 to 1; nan where a side is constant."""
    _check_lengths(predictions, references)
    return {"spearmanr": _correlation(_ranks(predictions), _ranks(references))}


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    # The computed variance of equal floats can be a little above zero.
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return math.nan
    predictions, references = predictions - predictions.mean(), references - references.mean()
    correlation = np.dot(predictions / np.linalg.norm(predictions), references / np.linalg.norm(references))
    return float(np.clip(correlation, -1.0, 1.0))


def mse(*, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Mean squared error, in the square of the target's unit."""
    _check_lengths(predictions, references)
    return {"mse": float(np.mean((np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2))}


# ----------------------------------------------------------------------------------------------------------------------
# Tagging
# ----------------------------------------------------------------------------------------------------------------------


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of a sentence's BIO tags.

    An `I-X` that continues no entity of type X begins one, as in the scorer of the CoNLL-2003 shared task.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    found = set()
    begin, kind = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((begin, position, kind))
            kind = ""
        if tag != "O" and not kind:
            begin, kind = position, tag[2:]
    return found


def seqeval(*, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Entity-level precision, recall and F1 over sentences of BIO tags, as in the CoNLL-2003 shared task.

    An entity is correct when its type and both its ends are. Returns `overall_precision`, `overall_recall`,
    `overall_f1`, the accuracy of tags `overall_accuracy`, and for every entity type a dictionary with "precision",
    "recall", "f1" (0 to 1) and "number" (of references).

    Raises:
        ValueError: The two sides differ in the number of sentences or of tags in a sentence, or a tag is not BIO.
    """
    _check_lengths(predictions, references)
    predicted_counts, expected_counts, shared = Counter[str](), Counter[str](), Counter[str]()
    right = total = 0
    for index, (predicted, expected) in enumerate(zip(predictions, references)):
        if len(predicted) != len(expected):
            raise ValueError(f"Sentence {index}: {len(predicted)} predicted tags for {len(expected)} reference tags.")
        for tag in (*predicted, *expected):
            if not re.fullmatch(r"O|[BI]-.+", tag):
                raise ValueError(f"Sentence {index}: the tag {tag!r} is not BIO; expected O, B-TYPE or I-TYPE.")
        right += sum(tag == gold_tag for tag, gold_tag in zip(predicted, expected))
        total += len(expected)
        ours, gold = entities(predicted), entities(expected)
        for counts, items in ((predicted_counts, ours), (expected_counts, gold), (shared, ours & gold)):
            counts.update(kind for _, _, kind in items)

    scores: dict[str, Any] = {}
    for kind in sorted(predicted_counts.keys() | expected_counts.keys()):
        scores[kind] = _precision_recall_f1(shared[kind], predicted_counts[kind], expected_counts[kind])
        scores[kind]["number"] = expected_counts[kind]
    overall = _precision_recall_f1(shared.total(), predicted_counts.total(), expected_counts.total())
    scores |= {f"overall_{name}": value for name, value in overall.items()}
    return scores | {"overall_accuracy": _ratio(right, total)}


def _precision_recall_f1(shared: int, predicted: int, expected: int) -> dict[str, Any]:
    return {
        "precision": _ratio(shared, predicted),
        "recall": _ratio(shared, expected),
        "f1": _ratio(2 * shared, predicted + expected),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Extractive question answering (Rajpurkar et al. 2016, section 6.1; Rajpurkar et al. 2018, section 4)
# ----------------------------------------------------------------------------------------------------------------------

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: the official script keeps “ ” and –
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """An answer as SQuAD compares it: in lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_exact(prediction: str, answer: str) -> float:
    """1.0 if both texts are equal after normalisation, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def answer_f1(prediction: str, answer: str) -> float:
    """F1 over the two bags of normalised words."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def _texts_by_id(predictions: Sequence[Prediction], references: Sequence[Answer]) -> dict[str, str]:
    """Predicted text by question id; raises ValueError unless the questions of both sides are the same."""
    texts = {prediction["id"]: prediction["prediction_text"] for prediction in predictions}
    expected = {reference["id"] for reference in references}
    if not expected:
        raise ValueError("No references; a metric needs at least one.")
    if texts.keys() != expected:
        missing, foreign = sorted(expected - texts.keys()), sorted(texts.keys() - expected)
        raise ValueError(
            f"Predictions and references are about different questions: {len(missing)} without a prediction "
            f"(first: {missing[:3]}), {len(foreign)} without a reference (first: {foreign[:3]})."
        )
    return texts


def squad(*, predictions: Sequence[Prediction], references: Sequence[Answer]) -> dict[str, float]:
    """SQuAD 1.1: `exact_match` and `f1` in percent, the best over a question's answers, averaged over questions."""
    texts = _texts_by_id(predictions, references)
    exact = overlap = 0.0
    for reference in references:
        text, answers = texts[reference["id"]], reference["answers"]["text"]
        if not answers:
            raise ValueError(f"Question {reference['id']!r} has no answer; squad_v2 scores unanswerable questions.")
        exact += max(answer_exact(text, answer) for answer in answers)
        overlap += max(answer_f1(text, answer) for answer in answers)
    return {"exact_match": 100 * exact / len(references), "f1": 100 * overlap / len(references)}


def squad_v2(
    *, predictions: Sequence[Prediction], references: Sequence[Answer], no_answer_threshold: float = 1.0
) -> dict[str, float]:
    """SQuAD 2.0: `exact` and `f1` in percent over all questions, with "" as answer of an unanswerable one.

    A prediction with a `no_answer_probability` above `no_answer_threshold` counts as "". Also returned: the number of
    questions `total`, the same three for answerable (`HasAns_`) and unanswerable (`NoAns_`) questions, and the best
    score of any threshold, with that threshold (`best_exact`, `best_exact_thresh`, `best_f1`, `best_f1_thresh`).
    """
    texts = _texts_by_id(predictions, references)
    null_probability = {prediction["id"]: float(prediction["no_answer_probability"]) for prediction in predictions}
    answerable: dict[str, bool] = {}
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for reference in references:
        key, text = reference["id"], texts[reference["id"]]
        # No prediction can equal an answer of articles and punctuation only, so it does not count as one.
        answers = [answer for answer in reference["answers"]["text"] if normalize_answer(answer)]
        answerable[key] = bool(reference["answers"]["text"])
        raw["exact"][key] = max(answer_exact(text, answer) for answer in answers or [""])
        empty = not normalize_answer(text)
        raw["f1"][key] = max((answer_f1(text, answer) for answer in answers), default=float(empty))

    scores: dict[str, float] = {}
    best: dict[str, float] = {}
    for name, values in raw.items():
        thresholded = {
            key: value if null_probability[key] <= no_answer_threshold else float(not answerable[key])
            for key, value in values.items()
        }
        for prefix, keys in (
            ("", list(answerable)),
            ("HasAns_", [key for key, has in answerable.items() if has]),
            ("NoAns_", [key for key, has in answerable.items() if not has]),
        ):
            if keys:
                scores[f"{prefix}{name}"] = 100 * sum(thresholded[key] for key in keys) / len(keys)
                scores[f"{prefix}total"] = len(keys)
        best[f"best_{name}"], best[f"best_{name}_thresh"] = _best_threshold(values, texts, null_probability, answerable)
    return scores | best


def _best_threshold(
    values: Mapping[str, float],
    texts: Mapping[str, str],
    null_probability: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score over all thresholds on the no-answer probability, in percent, and the smallest such threshold.

    At first no question is answered. Each is then answered in order of rising probability: an answerable one adds its
    score, an unanswerable one loses its point if there is a text.
    """
    score = best = float(sum(not has for has in answerable.values()))
    threshold = 0.0
    for key in sorted(null_probability, key=null_probability.__getitem__):
        score += values[key] if answerable[key] else -float(bool(texts[key]))
        if score > best:
            best, threshold = score, null_probability[key]
    return 100 * best / len(values), threshold


METRICS: dict[str, Callable[..., dict[str, Any]]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews_correlation,
    "pearsonr": pearsonr,
    "spearmanr": spearmanr,
    "mse": mse,
    "seqeval": seqeval,
    "squad": squad,
    "squad_v2": squad_v2,
}
