"""Metrics of generated texts, named as in the task files.

Predictions are the results of `TextTask.parse`. An unknown output (None) counts as wrong: for accuracies it equals no
label, for the F1 of two labels it is the wrong label, for numbers it is -1, and for texts it is the empty text (Raffel
et al. 2020, section 2.4, and its released code).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from hf_ctxmodels.downstream.tasks import metrics, text_metrics
from hf_ctxmodels.downstream.text2text.examples import TextExample

Examples = Sequence[TextExample]
Scores = dict[str, float]

UNKNOWN = -1  # label or number of an output without one
_DETERMINERS = {
    *("a", "an", "few", "her", "his", "each", "every", "many", "much", "my", "our", "some", "that", "the", "their"),
    *("these", "this", "those", "which", "whose", "your"),
}


@dataclass(frozen=True)
class Metric:
    """A metric of parsed outputs.

    Attributes:
        function: (examples, predictions) -> names and values.
        kinds: Kinds of tasks, and "referent".
        is_binary: Whether it needs two labels.
        needs_group: Whether it needs groups of examples.
    """

    function: Callable[[Examples, Sequence[Any]], Scores]
    kinds: tuple[str, ...]
    is_binary: bool = False
    needs_group: bool = False


def refers_to(output: str, referent: str) -> int | None:
    """1 if an output names a referent, else 0; None if it is empty.

    Case and determiners are ignored, and the words of one must be a subset of the words of the other; a possessive
    matches only a possessive (T5's evaluation of WSC).

    >>> refers_to("the councilmen", "The city councilmen"), refers_to("Bob", "Bob's mother")
    (1, 0)
    """
    output_words, referent_words = (
        {word for word in text.lower().split() if word not in _DETERMINERS} for text in (output, referent)
    )
    if not output_words:
        return None
    if ("'" in output) != ("'" in referent):
        return 0
    return int(output_words <= referent_words or referent_words <= output_words)


def _accuracy(examples: Examples, predictions: Sequence[Any]) -> Scores:
    matches = [prediction == example.label for example, prediction in zip(examples, predictions, strict=True)]
    return {"accuracy": sum(matches) / len(matches)}


def _f1(examples: Examples, predictions: Sequence[Any]) -> Scores:
    """F1 of the second of two labels."""
    references = [int(example.label or 0) for example in examples]
    labels = [
        1 - reference if prediction is None else prediction
        for prediction, reference in zip(predictions, references, strict=True)
    ]
    return {"f1": metrics.macro_f1(labels, references, [1])}


def _f1_macro(examples: Examples, predictions: Sequence[Any]) -> Scores:
    references = [int(example.label or 0) for example in examples]
    labels = sorted({*references, *predictions} - {None})
    return {"f1_macro": metrics.macro_f1(_replace_none(predictions, UNKNOWN), references, labels)}


def _matthews_correlation(examples: Examples, predictions: Sequence[Any]) -> Scores:
    references = [int(example.label or 0) for example in examples]
    scores = metrics.classification_scores(_replace_none(predictions, UNKNOWN), references, num_labels=2)
    return {"matthews_correlation": scores["matthews_correlation"]}


def _group_exact_match(examples: Examples, predictions: Sequence[Any]) -> Scores:
    """Share of groups whose labels are all correct."""
    groups: dict[str | None, list[bool]] = defaultdict(list)
    for example, prediction in zip(examples, predictions, strict=True):
        groups[example.group].append(prediction == example.label)
    return {"group_exact_match": float(np.mean([all(matches) for matches in groups.values()]))}


def _regression_score(examples: Examples, predictions: Sequence[Any], name: str) -> Scores:
    numbers = _replace_none(predictions, UNKNOWN)
    return {name: metrics.regression_scores(numbers, [float(example.label or 0) for example in examples])[name]}


def _best_reference(examples: Examples, predictions: Sequence[Any], metric: Callable[..., Scores]) -> Scores:
    """Mean over examples of the best value over the references."""
    scores: dict[str, list[float]] = defaultdict(list)
    for example, text in zip(examples, _replace_none(predictions, ""), strict=True):
        values = [metric([text], [reference]) for reference in example.targets]
        for name in values[0]:
            scores[name].append(max(value[name] for value in values))
    return {name: float(np.mean(values)) for name, values in scores.items()}


def _bleu(examples: Examples, predictions: Sequence[Any]) -> Scores:
    """BLEU with the first reference."""
    return text_metrics.bleu(_replace_none(predictions, ""), [example.targets[0] for example in examples])


def _squad(examples: Examples, predictions: Sequence[Any]) -> Scores:
    return metrics.squad_scores(_replace_none(predictions, ""), [example.targets for example in examples])


def _entities(examples: Examples, predictions: Sequence[Any]) -> Scores:
    """Entity F1 of BIO tags separated by spaces."""
    references, tags = _tags(examples, predictions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # seqeval, for each word of an output that is not a tag
        return metrics.entity_scores(tags, references)


def _tag_accuracy(examples: Examples, predictions: Sequence[Any]) -> Scores:
    references, tags = (list(chain.from_iterable(rows)) for rows in _tags(examples, predictions))
    return {"tag_accuracy": metrics.accuracy(tags, references)}


def _tags(examples: Examples, predictions: Sequence[Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Tags of the targets, and as many predicted tags: shorter outputs are padded with `O`, longer ones truncated."""
    references = [example.target.split() for example in examples]
    outputs = [text.split() for text in _replace_none(predictions, "")]
    return references, [
        (tags + ["O"] * len(reference))[: len(reference)] for tags, reference in zip(outputs, references, strict=True)
    ]


def _replace_none(predictions: Sequence[Any], value: Any) -> list[Any]:
    return [value if prediction is None else prediction for prediction in predictions]


METRICS: dict[str, Metric] = {
    "accuracy": Metric(_accuracy, ("classification", "referent")),
    "f1": Metric(_f1, ("classification",), is_binary=True),
    "f1_macro": Metric(_f1_macro, ("classification",)),
    "matthews_correlation": Metric(_matthews_correlation, ("classification",)),
    "group_exact_match": Metric(_group_exact_match, ("classification",), needs_group=True),
    **{name: Metric(partial(_regression_score, name=name), ("number",)) for name in ("pearsonr", "spearmanr", "mse")},
    "exact_match": Metric(partial(_best_reference, metric=text_metrics.exact_match), ("text",)),
    "rouge": Metric(partial(_best_reference, metric=text_metrics.rouge), ("text",)),
    "bleu": Metric(_bleu, ("text",)),
    "squad": Metric(_squad, ("text",)),
    "entities": Metric(_entities, ("text",)),
    "tag_accuracy": Metric(_tag_accuracy, ("text",)),
}

PERCENTAGES = ("bleu", "squad")
"""Metrics with a maximum of 100."""

DEFAULT_METRICS = {
    "classification": ("accuracy",),
    "number": ("pearsonr", "spearmanr"),
    "text": ("exact_match",),
    "referent": ("accuracy",),
}


def deca_score(metrics: Mapping[str, str], scores: Mapping[str, float]) -> float:
    """decaScore (McCann et al. 2018, section 2.2): the sum over tasks of the main score in percent, for summaries the
    mean of the three ROUGE scores; ten tasks have at most 1000.

    Args:
        metrics: Task -> its main metric, a key of `METRICS`.
        scores: Scores of the tasks, named `<task>_<score>`.
    """
    total = 0.0
    for task, metric in metrics.items():
        names = {"rouge": ("rouge1", "rouge2", "rougeL"), "squad": ("f1",), "entities": ("f1",)}.get(metric, (metric,))
        maximum = 100 if metric in PERCENTAGES else 1
        total += 100 * sum(scores[f"{task}_{name}"] for name in names) / len(names) / maximum
    return total
