"""Comparison of two language models, word by word (LMdiff: Strobelt et al. 2021, arXiv 2111.01582, section 3).

LMdiff compares models with one vocabulary, token by token. Here the unit is the word, so that the tokenizers may
differ: the log-probability of a word is the sum of its tokens' log-probabilities, its rank the highest rank number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.figures import Figure, ScatterMap, TokenComparison
from hf_ctxmodels.analysis.results import AnalysisResult, Table
from hf_ctxmodels.architectures.sentence_encoder import max_sentence_length
from hf_ctxmodels.architectures.word_alignment import NO_WORD, split_words, word_spans, words_at
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.evaluation.scoring import LikelihoodKind, TokenScore, input_length, score_tokens

_NUM_LARGEST = 20
_MAX_POINTS = 1000
_PSEUDO_LIKELIHOOD_NOTE = (
    "Pseudo-log-likelihoods: each token given all other tokens, also of the same word, so words of several tokens seem "
    "probable."
)
_MIXED_KINDS_NOTE = (
    "One model reads the left context, the other one both sides: their log-probabilities differ in kind, compare ranks "
    "of words within a model."
)


@dataclass
class WordScores:
    """Words of a text under a language model; None for words that the model does not predict, such as the first one.

    Attributes:
        words: The words and punctuation marks.
        log_probabilities: In nats.
        ranks: 1 for the most probable word of one token.
        predictions: The most probable tokens for the first token of each word.
    """

    words: list[str]
    log_probabilities: list[float | None]
    ranks: list[int | None]
    predictions: list[list[str]]


def score_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, *, batch_size: int = 32
) -> WordScores | None:
    """Score the words of a text; None if it exceeds the maximum length of the model.

    Args:
        model, tokenizer, batch_size: See `hf_ctxmodels.evaluation.score_tokens`.

    Raises:
        CtxError: The model has no language modeling head, the tokenizer has no offsets, or the text has no token.
    """
    if not tokenizer.is_fast:
        raise CtxError(f"{type(tokenizer).__name__} has no offsets.", hint="use a tokenizer with a tokenizer.json.")
    limit = max_sentence_length(model.base_model, tokenizer)
    if limit is not None and input_length(model, tokenizer, text) > limit:
        return None
    encoding = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    words = split_words(text)
    token_words = words_at(np.asarray(encoding["offset_mapping"]).reshape(-1, 2), word_spans(text))
    token_words[np.asarray(encoding["special_tokens_mask"], dtype=bool)] = NO_WORD
    scores: list[list[TokenScore]] = [[] for _ in words]
    for token in score_tokens(model, tokenizer, text, batch_size=batch_size):
        # the end of the text, after the last token, is not a word
        if token.position < len(token_words) and token_words[token.position] != NO_WORD:
            scores[token_words[token.position]].append(token)
    counts = np.bincount(token_words[token_words != NO_WORD], minlength=len(words))
    complete = [tokens if len(tokens) == count else [] for tokens, count in zip(scores, counts)]
    return WordScores(
        words,
        [sum(token.log_probability for token in tokens) if tokens else None for tokens in complete],
        [max((token.rank for token in tokens), default=None) for tokens in complete],
        [[_token_text(tokenizer, i) for token in tokens[:1] for i in token.predictions] for tokens in complete],
    )


def _token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    return tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(token_id)]).strip() or "␣"


def _differences(first: WordScores, second: WordScores) -> list[float | None]:
    pairs = zip(first.log_probabilities, second.log_probabilities)
    return [None if a is None or b is None else a - b for a, b in pairs]


def word_figure(name: str, title: str, scores: Mapping[str, WordScores], caption: str) -> TokenComparison:
    """Log-probabilities and ranks of the words of a text, and the difference of the first two models; on hover, the
    predictions.

    Args:
        scores: Name of a model -> its scores.
    """
    columns: dict[str, list[float | None]] = {}
    for model, word_scores in scores.items():
        columns |= {f"log P, {model}": word_scores.log_probabilities, f"rank, {model}": list(word_scores.ranks)}
    first, *others = scores.values()
    if others:
        columns["difference"] = _differences(first, others[0])
    predictions = zip(*(word_scores.predictions for word_scores in scores.values()))
    texts = [
        "\n".join(f"{model} predicts: {', '.join(tokens)}" for model, tokens in zip(scores, words) if tokens)
        for words in predictions
    ]
    return TokenComparison(name, title, first.words, columns, texts, caption=caption)


@dataclass
class TextComparison:
    """A text and its words under both models."""

    text: str
    scores: tuple[WordScores, WordScores]

    @property
    def differences(self) -> list[float | None]:
        """Log-probability of each word under the first model minus that under the second one."""
        return _differences(*self.scores)

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference of the words that both models predict, 0 without one."""
        present = [abs(value) for value in self.differences if value is not None]
        return sum(present) / max(len(present), 1)


def comparison_result(
    comparisons: Sequence[TextComparison],
    names: Sequence[str],
    kinds: Sequence[LikelihoodKind],
    *,
    max_figures: int = 20,
) -> AnalysisResult:
    """Tables and figures of a comparison.

    Args:
        comparisons: The texts.
        names: Short names of the models.
        kinds: Their kinds, see `hf_ctxmodels.evaluation.likelihood_kind`.
        max_figures: Texts to show word by word: those with the largest mean difference, the largest first.
    """
    words = [(text, index) for text in comparisons for index, value in enumerate(text.differences) if value is not None]
    if not words:
        raise CtxError("No word is predicted by both models.", hint="use texts with more than one word.")
    note = _MIXED_KINDS_NOTE if len(set(kinds)) > 1 else "" if kinds[0] == "log-likelihood" else _PSEUDO_LIKELIHOOD_NOTE
    tables = [_summary(words, names, kinds, note), _largest_differences(words, names)]
    ordered = sorted(comparisons, key=lambda text: -text.mean_difference)[:max_figures]
    figures: list[Figure] = [_scatter(words, names, note)]
    figures += [_text_figure(f"text-{number}", text, names) for number, text in enumerate(ordered, 1)]
    values = {
        "likelihoods": dict(zip(names, kinds)),
        "texts": [
            {
                "text": text.text,
                "words": text.scores[0].words,
                "log_probabilities": {name: scores.log_probabilities for name, scores in zip(names, text.scores)},
                "ranks": {name: scores.ranks for name, scores in zip(names, text.scores)},
            }
            for text in comparisons
        ],
    }
    return AnalysisResult("compare", names, {}, tables, figures, values)


Words = Sequence[tuple[TextComparison, int]]
"""Words that both models predict: the text and the index in it."""


def _summary(words: Words, names: Sequence[str], kinds: Sequence[LikelihoodKind], note: str) -> Table:
    cells = []
    for model, kind in enumerate(kinds):
        scores = [(text.scores[model].log_probabilities[i], text.scores[model].ranks[i]) for text, i in words]
        mean = sum(value or 0.0 for value, _ in scores) / len(scores)
        ranks = np.array([rank for _, rank in scores])
        shares = [float((ranks <= limit).mean()) for limit in (1, 10)]
        cells.append([kind, len(scores), mean, math.exp(min(-mean, 700)), *shares, float(np.median(ranks))])
    columns = ["score", "words", "mean log P (nats)", "perplexity per word", "rank 1", "rank ≤ 10", "median rank"]
    return Table("Words under both models", columns, list(names), cells, note=note)


def _largest_differences(words: Words, names: Sequence[str]) -> Table:
    def difference(item: tuple[TextComparison, int]) -> float:
        return abs(item[0].differences[item[1]] or 0.0)

    largest = sorted(words, key=difference, reverse=True)[:_NUM_LARGEST]
    cells = []
    for text, index in largest:
        before, after = text.scores[0].words[max(index - 6, 0) : index], text.scores[0].words[index + 1 : index + 4]
        log_probabilities = [scores.log_probabilities[index] for scores in text.scores]
        ranks = [scores.ranks[index] for scores in text.scores]
        context = f"{' '.join(before)} [{text.scores[0].words[index]}] {' '.join(after)}".strip()
        cells.append([context, *log_probabilities, text.differences[index], *ranks])
    columns = [
        "word in context",
        *(f"log P, {name}" for name in names),
        "difference",
        *(f"rank, {name}" for name in names),
    ]
    rows = [text.scores[0].words[index] for text, index in largest]
    return Table("Largest differences", columns, rows, cells, digits=2)


def _scatter(words: Words, names: Sequence[str], note: str) -> ScatterMap:
    shown = words[:_MAX_POINTS]
    points = [[scores.log_probabilities[index] or 0.0 for scores in text.scores] for text, index in shown]
    groups = [f"higher under {names[0] if x > y else names[1]}" for x, y in points]
    texts = [
        f"{text.scores[0].words[i]} ({x:.2f} and {y:.2f}): {text.text}" for (text, i), (x, y) in zip(shown, points)
    ]
    caption = f"Words of the first texts, at most {_MAX_POINTS:,}. {note}".strip()
    return ScatterMap(
        "words", "Log-probabilities of words under both models", points, groups, texts,
        x_label=f"log P, {names[0]}", y_label=f"log P, {names[1]}", caption=caption,
    )  # fmt: skip


def _text_figure(figure_name: str, text: TextComparison, names: Sequence[str]) -> TokenComparison:
    title = text.text if len(text.text) <= 60 else f"{text.text[:59]}…"
    caption = (
        f"Difference: log P under {names[0]} minus log P under {names[1]}, in nats. Mean absolute difference: "
        f"{text.mean_difference:.2f}. Rank 1 is the most probable token."
    )
    return word_figure(figure_name, title, dict(zip(names, text.scores)), caption)
