"""Metrics of generated text with one reference for each text: ROUGE, BLEU and exact match.

ROUGE is computed by `rouge_score`, BLEU by sacreBLEU, both in the extra `generation`. Result keys and ranges follow the
`evaluate` library, except the key `bleu`. All functions raise CtxError if the numbers of texts and references differ or
are 0, or a package is not installed.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import decode_generated

_ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_MODULES = {"rouge": "rouge_score.rouge_scorer", "bleu": "sacrebleu.metrics"}


class Bleu(NamedTuple):
    """Corpus BLEU, 0 to 100, and sacreBLEU's signature."""

    score: float
    signature: str


def corpus_bleu(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> Bleu:
    """sacreBLEU (Post 2018, arXiv 1804.08771) of a corpus with one reference per text, with its default tokenization
    `13a`; T5's released evaluation has `intl`."""
    _check_lengths(predictions, references)
    metric = _import_package("bleu").BLEU(lowercase=lower_case)
    score = metric.corpus_score(list(predictions), [list(references)]).score
    return Bleu(float(score), str(metric.get_signature()))


def bleu(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """`bleu`: the score of `corpus_bleu`, 0 to 100."""
    return {"bleu": corpus_bleu(predictions, references, lower_case=lower_case).score}


def rouge(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """Mean F1 of unigrams (`rouge1`), bigrams (`rouge2`), the longest common subsequence of both texts (`rougeL`), and
    the union of the longest common subsequences of sentences (`rougeLsum`; Lin 2004, section 3.2), 0 to 1.

    Sentences end at line breaks and at " . ", as in the released evaluation of T5, which reports `rouge1`, `rouge2` and
    `rougeLsum`; `rougeLsum` equals `rougeL` for texts of one sentence. Without stemming. Case is ignored, and a word
    consists of the letters a to z and digits: use BLEU for other alphabets.
    """
    _check_lengths(predictions, references)
    scorer = _import_package("rouge").RougeScorer(list(_ROUGES), use_stemmer=False)
    sides = ([text.replace(" . ", " .\n") for text in side] for side in (references, predictions))
    scores = [scorer.score(target, prediction) for target, prediction in zip(*sides, strict=True)]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in _ROUGES}


def exact_match(predictions: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> dict[str, float]:
    """`exact_match`: share of texts equal to their reference up to whitespace, 0 to 1."""
    _check_lengths(predictions, references)
    sides = [
        [" ".join((text.lower() if lower_case else text).split()) for text in side]
        for side in (predictions, references)
    ]
    return {"exact_match": sum(map(str.__eq__, *sides)) / len(references)}


TEXT_METRICS: dict[str, Callable[..., dict[str, float]]] = {"rouge": rouge, "bleu": bleu, "exact_match": exact_match}


def metric_names(names_text: str) -> list[str]:
    """The metrics in a list separated by commas; raises CtxError if one is unknown or repeated, or its package is
    missing."""
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


UPPER_BOUND_NOTE = (
    "upper bound: score of references that the tokenizer encoded and decoded; NAME_normalized: score against these"
)


class NormalizedReferences:
    """References encoded and decoded by a tokenizer: the best possible output of a model with this tokenizer, if the
    tokenizer lower-cases, drops accents, sets spaces around punctuation or lacks words.

    Args:
        tokenizer: The tokenizer of the targets.
        metrics: Names of `TEXT_METRICS`.
        lower_case: Whether the metrics ignore case.
        tokenizer_arguments: Language arguments of the tokenizer, see `LanguagePair.tokenizer_arguments`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        metrics: Sequence[str],
        *,
        lower_case: bool = False,
        tokenizer_arguments: Mapping[str, str] | None = None,
    ) -> None:
        self._encoded_in = tokenizer_arguments or {}
        self._tokenizer, self._metrics, self._lower_case = tokenizer, metrics, lower_case
        self._decoded: dict[str, str] = {}

    def texts(self, references: Sequence[str]) -> list[str]:
        """The references encoded and decoded by the tokenizer, without special tokens."""
        if new := [reference for reference in dict.fromkeys(references) if reference not in self._decoded]:
            ids = self._tokenizer(text_target=new, verbose=False, **self._encoded_in)["input_ids"]
            self._decoded |= zip(new, decode_generated(self._tokenizer, ids), strict=True)
        return [self._decoded[reference] for reference in references]

    def differ(self, references: Sequence[str]) -> bool:
        """Whether a reference differs after decoding, except in whitespace and, if ignored, case."""
        return exact_match(self.texts(references), references, lower_case=self._lower_case)["exact_match"] < 1

    def upper_bounds(self, references: Sequence[str]) -> dict[str, float]:
        """The metrics of `texts` against the references; empty if they do not differ."""
        if not self.differ(references):
            return {}
        return score_texts(self._metrics, self.texts(references), references, lower_case=self._lower_case)

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """The metrics of predictions against `texts`, as `NAME_normalized`; empty if no reference differs."""
        if not self.differ(references):
            return {}
        scores = score_texts(self._metrics, predictions, self.texts(references), lower_case=self._lower_case)
        return {f"{name}_normalized": score for name, score in scores.items()}


def _check_lengths(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references) or not references:
        raise CtxError(
            f"{len(predictions)} texts, {len(references)} references.", hint="use one reference for each text."
        )


def _import_package(name: str) -> Any:
    """The module that computes a metric, if it is not computed here."""
    try:
        return import_module(_MODULES[name]) if name in _MODULES else None
    except ImportError as error:
        raise CtxError(
            f"The metric {name} needs the package {_MODULES[name].partition('.')[0]}.",
            location=f"--metrics {name}",
            hint="pip install 'hf_ctxmodels[generation]', or choose other --metrics.",
        ) from error
