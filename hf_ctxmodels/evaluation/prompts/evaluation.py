"""Evaluation of a model on a prompt task: requests, answers, metrics with standard errors, and baselines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.continuations import ContinuationScore, GreedyAnswer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.text2text.metrics import METRICS
from hf_ctxmodels.evaluation.clozes import Cloze, score_clozes
from hf_ctxmodels.evaluation.minimal_pairs import unigram_scorer
from hf_ctxmodels.evaluation.perplexity import perplexity_from_nats
from hf_ctxmodels.evaluation.prompts.tasks import PromptExample, PromptTask
from hf_ctxmodels.evaluation.scoring import score_pseudo_continuations

_CORPUS_METRICS = ("bleu", "entities", "tag_accuracy")  # not means over examples


class LikelihoodScorer(Protocol):
    """Scores continuations of contexts: `ContinuationScorer`, `PseudoLikelihoodScorer` or `UnigramScorer`."""

    def score(self, requests: Sequence[tuple[str, str]]) -> list[ContinuationScore]:
        """Scores of pairs of context and continuation."""


@runtime_checkable
class ClozeScorer(Protocol):
    """Scores the choices of clozes: `PseudoLikelihoodScorer`."""

    def score_clozes(self, clozes: Sequence[Cloze]) -> list[list[ContinuationScore]]:
        """Scores of the choices of each cloze."""


@runtime_checkable
class GreedyDecoder(Protocol):
    """Generates answers to prompts: `ContinuationScorer`."""

    def greedy_answers(
        self, contexts: Sequence[str], *, until: Sequence[str] = (), max_new_tokens: int = 64
    ) -> list[GreedyAnswer]:
        """The most probable tokens after each context, up to one of the strings `until`."""


class MetricValue(NamedTuple):
    """A metric and its standard error, None if there is none."""

    value: float
    standard_error: float | None = None


@dataclass(frozen=True)
class PromptResult:
    """Results of a model on a task.

    Attributes:
        metrics: In the order of the table of results; none for unlabeled examples.
        records: Prompt, answers and their log-likelihoods, the most probable answer, or output of each example.
        truncated: Share of the examples whose context was truncated for one of the answers.
    """

    metrics: dict[str, MetricValue]
    records: list[dict[str, Any]] = field(repr=False)
    truncated: float = 0.0


def evaluate_prompts(
    task: PromptTask,
    examples: Sequence[PromptExample],
    contexts: Sequence[str],
    scorer: LikelihoodScorer,
) -> PromptResult:
    """Evaluate a model on the examples of a task.

    Metrics of choices: `acc`, by the likelihood of the choices; `acc_norm`, `acc_bytes` and `acc_tokens`, by the
    log-likelihood per character, byte and token; `acc_calibrated`, by the likelihood divided by the likelihood after
    `task.calibration` (Brown et al. 2020, section 2.4); and the task's metrics, by the likelihood. Metrics of the
    likelihood of targets: `acc`, whether greedy decoding gives the target, and `perplexity` per target. `acc`,
    `acc_norm`, `acc_bytes` and `perplexity` are defined as in lm-evaluation-harness.

    Args:
        contexts: Text before the input of each example, see `PromptTask.contexts`.
        scorer: The model's likelihoods, and for generated answers a `GreedyDecoder`.

    Raises:
        CtxError: The task needs generated answers, and the model generates none; or it is a cloze, and the model
            predicts no masked tokens.
    """
    if not examples or len(examples) != len(contexts):
        raise CtxError(f"{len(examples)} examples, {len(contexts)} contexts.", hint="use a context for each example.")
    if task.output == "text":
        if not isinstance(scorer, GreedyDecoder):
            raise CtxError(
                f"The task {task.name} needs a model that generates text.",
                location=f"task {task.name}",
                hint="use a causal language model or an encoder-decoder.",
            )
        return _evaluate_texts(task, examples, contexts, scorer)
    if task.scoring == "cloze":
        return _evaluate_clozes(task, examples, contexts, scorer)
    requests = [task.requests(context, example) for context, example in zip(contexts, examples, strict=True)]
    scores = _score(scorer, [request for group in requests for request in group])
    groups = [[scores[request] for request in group] for group in requests]
    records = [
        _record(example, group[0][0], [continuation for _, continuation in group], group_scores)
        for example, group, group_scores in zip(examples, requests, groups, strict=True)
    ]
    if task.output == "likelihood":
        metrics = _likelihood_metrics([score for (score,) in groups])
    else:
        calibrations = None
        if task.scoring == "full":
            pairs = [[(task.calibration, continuation) for _, continuation in group] for group in requests]
            calibration_scores = _score(scorer, [pair for group in pairs for pair in group])
            calibrations = [[calibration_scores[pair].log_probability for pair in group] for group in pairs]
        metrics = _choice_metrics(task, examples, groups, calibrations)
    return PromptResult(metrics, records, _share_of_truncated(groups))


def _evaluate_clozes(
    task: PromptTask, examples: Sequence[PromptExample], contexts: Sequence[str], scorer: LikelihoodScorer
) -> PromptResult:
    """`acc` by the probabilities of the choices at the mask, and the task's metrics."""
    if not isinstance(scorer, ClozeScorer):
        raise CtxError(
            f"The task {task.name} needs a model that predicts masked tokens.",
            location=f"task {task.name}",
            hint="use a masked language model.",
        )
    scores = scorer.score_clozes([task.cloze(*pair) for pair in zip(contexts, examples, strict=True)])
    records = [
        _record(example, context + example.text.input, example.text.choices, group)
        for context, example, group in zip(contexts, examples, scores, strict=True)
    ]
    return PromptResult(_choice_metrics(task, examples, scores, None), records, _share_of_truncated(scores))


def _record(
    example: PromptExample, context: str, continuations: Sequence[str], scores: Sequence[ContinuationScore]
) -> dict[str, Any]:
    """The record of an example; the prediction is the choice with the highest likelihood, None without choices."""
    log_probabilities, choices = [score.log_probability for score in scores], example.text.choices
    return {
        "location": example.text.location,
        "context": context,
        "continuations": list(continuations),
        "log_probabilities": log_probabilities,
        "prediction": choices[int(np.argmax(log_probabilities))] if choices else None,
        "label": example.text.label,
    }


def _share_of_truncated(scores: Sequence[Sequence[ContinuationScore]]) -> float:
    return float(np.mean([any(score.is_truncated for score in group) for group in scores]))


def _score(scorer: LikelihoodScorer, requests: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ContinuationScore]:
    """Scores of the distinct requests."""
    distinct = list(dict.fromkeys(requests))
    return dict(zip(distinct, scorer.score(distinct), strict=True))


def _likelihood_metrics(scores: Sequence[ContinuationScore]) -> dict[str, MetricValue]:
    log_probability = mean_value([score.log_probability for score in scores])
    perplexity = perplexity_from_nats(-log_probability.value)
    error = log_probability.standard_error
    return {
        "acc": mean_value([score.is_greedy for score in scores]),
        # by the delta method; the harness draws bootstrap samples
        "perplexity": MetricValue(perplexity, None if error is None else perplexity * error),
    }


def _choice_metrics(
    task: PromptTask,
    examples: Sequence[PromptExample],
    scores: Sequence[Sequence[ContinuationScore]],
    calibrations: Sequence[Sequence[float]] | None,
) -> dict[str, MetricValue]:
    """Accuracies of the highest-scoring choice (of equal scores, the first); empty for unlabeled examples."""
    if not examples[0].text.targets:
        return {}
    totals = [np.array([score.log_probability for score in group]) for group in scores]
    values = {"acc": totals}
    if calibrations is not None:
        answers = [[choice + example.suffix for choice in example.text.choices] for example in examples]
        values |= {
            "acc_norm": [total / list(map(len, texts)) for total, texts in zip(totals, answers)],
            "acc_bytes": [total / [len(t.encode()) for t in texts] for total, texts in zip(totals, answers)],
            "acc_tokens": [total / [s.num_tokens for s in group] for total, group in zip(totals, scores)],
            "acc_calibrated": [total - np.array(group) for total, group in zip(totals, calibrations, strict=True)],
        }
    predictions = {name: [int(row.argmax()) for row in rows] for name, rows in values.items()}
    labels = [example.text.label for example in examples]
    metrics = {
        name: mean_value([prediction == label for prediction, label in zip(indices, labels, strict=True)])
        for name, indices in predictions.items()
    }
    texts = [example.text for example in examples]
    for name in task.text.metrics:
        if name != "accuracy":
            results = METRICS[name].function(texts, predictions["acc"])
            metrics |= {key: MetricValue(value) for key, value in results.items()}
    return metrics


def _evaluate_texts(
    task: PromptTask, examples: Sequence[PromptExample], contexts: Sequence[str], decoder: GreedyDecoder
) -> PromptResult:
    """Metrics of greedy answers up to the first line break."""
    prompts = [context + example.text.input for context, example in zip(contexts, examples, strict=True)]
    answers = decoder.greedy_answers(prompts, until=["\n"], max_new_tokens=task.max_new_tokens)
    outputs = [answer.text for answer in answers]
    texts = [example.text for example in examples]
    predictions = [task.text.parse(text, output) for text, output in zip(texts, outputs, strict=True)]
    metrics: dict[str, MetricValue] = {}
    for name in task.text.metrics if texts[0].targets else ():
        function = METRICS[name].function
        if name in _CORPUS_METRICS:
            metrics |= {key: MetricValue(value) for key, value in function(texts, predictions).items()}
            continue
        values = [function([text], [prediction]) for text, prediction in zip(texts, predictions, strict=True)]
        metrics |= {key: mean_value([scores[key] for scores in values]) for key in values[0]}
    records = [
        {"location": text.location, "context": prompt, "output": output, "targets": list(text.targets)}
        for text, prompt, output in zip(texts, prompts, outputs, strict=True)
    ]
    return PromptResult(metrics, records, mean_value([answer.is_truncated for answer in answers]).value)


def mean_value(values: Sequence[float]) -> MetricValue:
    """The mean and its standard error, the sample standard deviation divided by the root of the number of values:
    sqrt(p (1 - p) / (n - 1)) for an accuracy p of n examples."""
    mean = float(np.mean(values))
    return MetricValue(mean, float(np.std(values, ddof=1)) / sqrt(len(values)) if len(values) > 1 else None)


def majority_accuracy(pool: Sequence[PromptExample], examples: Sequence[PromptExample]) -> MetricValue:
    """Accuracy of the most frequent label of the pool."""
    (label, _), *_ = Counter(example.text.label for example in pool).most_common(1)
    return mean_value([example.text.label == label for example in examples])


class UnigramScorer:
    """Baseline that ignores the context: token unigram probabilities with add-one smoothing.

    Args:
        tokenizer: The tokenizer of the compared model.
        texts: Texts to count tokens in, preferably the training text of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
        self._tokenizer, self._log_probabilities = tokenizer, unigram_scorer(tokenizer, texts)

    def score(self, requests: Sequence[tuple[str, str]]) -> list[ContinuationScore]:
        """Scores of the continuations alone, which are never greedy."""
        continuations = [continuation for _, continuation in requests]
        return [
            ContinuationScore(log_probability, len(self._tokenizer.tokenize(text)), len(text.encode()), False)
            for text, log_probability in zip(continuations, self._log_probabilities(continuations), strict=True)
        ]


class PseudoLikelihoodScorer:
    """Scores continuations and clozes by a masked language model or XLNet; see `score_pseudo_continuations` for the
    arguments."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._options: dict[str, Any] = {"max_length": max_length, "batch_tokens": batch_tokens}

    def score(self, requests: Sequence[tuple[str, str]]) -> list[ContinuationScore]:
        """Pseudo-log-likelihoods of the continuations; raises CtxError as `score_pseudo_continuations`."""
        return score_pseudo_continuations(self._model, self._tokenizer, requests, **self._options)

    def score_clozes(self, clozes: Sequence[Cloze]) -> list[list[ContinuationScore]]:
        """Scores of the choices of each cloze; raises CtxError as `score_clozes`."""
        return score_clozes(self._model, self._tokenizer, clozes, **self._options)
