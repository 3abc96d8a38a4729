"""Metrics of generated text with one reference for each text: ROUGE, BLEU and exact match.

ROUGE is computed by `rouge_score`, BLEU by sacreBLEU, both in the extra `generation`. Result keys and ranges follow the
`evaluate` library, except the key `bleu`. `TEXT_METRICS` maps names to functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hf_ctxmodels.core.errors import CtxError

_ROUGES = ("rouge1", "rouge2", "rougeL")
_MODULES = {"rouge": "rouge_score.rouge_scorer", "bleu": "sacrebleu.metrics"}


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU.

    Attributes:
        score: 0 to 100.
        signature: sacreBLEU's signature.
    """

    score: float
    signature: str


def corpus_bleu(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> Bleu:
    """sacreBLEU (Post 2018, arXiv 1804.08771) of a corpus with one reference per text.

    Raises:
        CtxError: The numbers of texts and references differ or are 0, or sacreBLEU is not installed.
    """
    _check_lengths(predictions, references)
    metric = _import_package("bleu").BLEU(lowercase=lower_case)
    score = metric.corpus_score(list(predictions), [list(references)]).score
    return Bleu(float(score), str(metric.get_signature()))


def bleu(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """`bleu`: the score of `corpus_bleu`, 0 to 100."""
    return {"bleu": corpus_bleu(predictions, references, lower_case=lower_case).score}


def rouge(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """`rouge1`, `rouge2`, `rougeL` (Lin 2004): F1 of unigrams, bigrams and the longest common subsequence, 0
    to 1.

    Means over the texts, without stemming. Case is ignored, and a word consists of the letters a to z and digits: use
    BLEU for other alphabets.

    Raises:
        CtxError: The numbers of texts and references differ or are 0, or rouge_score is not installed.
    """
    _check_lengths(predictions, references)
    scorer = _import_package("rouge").RougeScorer(list(_ROUGES), use_stemmer=False)
    scores = [scorer.score(target, prediction) for target, prediction in zip(references, predictions, strict=True)]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in _ROUGES}


def exact_match(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """`exact_match`: share of texts equal to their reference up to whitespace, 0 to 1.

    Raises:
        CtxError: The numbers of texts and references differ or are 0.
    """
    _check_lengths(predictions, references)
    sides = [
        [" ".join((text.lower() if lower_case else text).split()) for text in side]
        for side in (predictions, references)
    ]
    return {"exact_match": sum(map(str.__eq__, *sides)) / len(references)}


TEXT_METRICS: dict[str, Callable[..., dict[str, float]]] = {"rouge": rouge, "bleu": bleu, "exact_match": exact_match}


def metric_names(names_text: str) -> list[str]:
    """The metrics in a list separated by commas, whose packages are installed.

    Raises:
        CtxError: A name is unknown or occurs twice, or a package is missing.
    """
    names = [name.strip() for name in names_text.split(",")]
    if unknown := [name for name in names if name not in TEXT_METRICS]:
        raise CtxError(
            f"There is no metric {unknown[0]!r}.",
            location=f"--metrics {names_text}",
            hint=f"use {', '.join(TEXT_METRICS)}, separated by commas.",
        )
    if len(set(names)) < len(names):
        raise CtxError("A metric occurs twice.", location=f"--metrics {names_text}", hint="name each metric once.")
    for name in names:
        _import_package(name)
    return names


def score_texts(
    names: Sequence[str], predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False
) -> dict[str, float]:
    """The results of several of the `TEXT_METRICS`."""
    scores: dict[str, float] = {}
    for name in names:
        scores |= TEXT_METRICS[name](predictions, references, lower_case=lower_case)
    return scores


def _check_lengths(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references) or not references:
        raise CtxError(
            f"{len(predictions)} texts, {len(references)} references.", hint="use one reference for each text."
        )


def _import_package(name: str) -> Any:
    """The module that computes a metric; None if no package is needed."""
    if name not in _MODULES:
        return None
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        package = _MODULES[name].partition(".")[0]
        raise CtxError(
            f"The metric {name} needs the package {package}.",
            location=f"--metrics {name}",
            hint="pip install 'hf_ctxmodels[generation]', or choose other --metrics.",
        ) from error
