"""The update of `layers.window_prediction`, word by word, compiled for a CPU by numba (extra `words`).

Word vectors take so few operations for each word that, done as dense products, gathering and scattering them weighs as
much. Here a word's predictors are read where they stand, and the words that a block shares as negatives stay in the
cache. Each word sees the changes of the one before it, as in the released code (Mikolov et al. 2013b).

Nothing here is called but by `window_prediction`, whose grids say the same and are what the tests hold this against.
"""

import math

import numpy as np
from numba import njit

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.models._shared.static import FASTMATH
from hf_ctxmodels.models.word2vec.prefetch import fetch

_LEAST = 2.0**-24  # what a probability counts as, at least, in the reported loss


@njit(nogil=True, cache=True, inline="always")
def _add(vector: np.ndarray, other: np.ndarray) -> None:
    for d in range(len(vector)):
        vector[d] += other[d]


@njit(fastmath=FASTMATH, nogil=True, cache=True, inline="always")
def _score(predictor: np.ndarray, output: np.ndarray) -> np.float32:
    score = np.float32(0.0)
    for d in range(len(output)):
        score += predictor[d] * output[d]
    return score


@njit(fastmath=FASTMATH, nogil=True, cache=True, inline="always")
def _fit(
    predictor: np.ndarray, error: np.ndarray, output: np.ndarray, score: np.float32, sign: float, rate: float
) -> float:
    """One logistic regression of a predictor against a row of the output table: the row follows, `error` is added to.

    Args:
        score: of the two.
        sign: 1.0 if the two belong together, else -1.0.

    Returns: the probability of what is right.
    """
    wrong = np.float32(1.0) / (np.float32(1.0) + np.exp(sign * score))
    step = rate * sign * wrong
    for d in range(len(output)):
        before = output[d]
        error[d] += step * before
        output[d] = before + step * predictor[d]
    return max(1.0 - np.float64(wrong), _LEAST)


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def _against_negatives(
    predictor: np.ndarray,
    error: np.ndarray,
    outputs: np.ndarray,
    label: int,
    negatives: np.ndarray,
    scores: np.ndarray,
    share: float,
    rate: float,
) -> float:
    """A predictor against the word to be predicted and its negatives, each of which counts `share`.

    All scores come first, so that a row is on its way from memory while another is read.
    """
    one = np.float32(1.0)
    label_score = _score(predictor, outputs[label])
    for k in range(len(negatives)):
        scores[k] = _score(predictor, outputs[negatives[k]])
    loss = -math.log(_fit(predictor, error, outputs[label], label_score, one, rate))
    others = 1.0  # a product takes one logarithm; that of hundreds of probabilities would vanish
    for k in range(len(negatives)):
        if negatives[k] != label:
            others *= _fit(predictor, error, outputs[negatives[k]], scores[k], -one, rate * share)
            if others < 1e-200:
                loss -= share * math.log(others)
                others = 1.0
    return loss - share * math.log(others)


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def _along_path(
    predictor: np.ndarray, error: np.ndarray, outputs: np.ndarray, path: np.ndarray, codes: np.ndarray, rate: float
) -> float:
    """A predictor against the inner nodes on the way to a word."""
    loss = 0.0
    for step in range(len(path)):
        if path[step] >= 0:
            sign = np.float32(1.0 - 2.0 * codes[step])
            score = _score(predictor, outputs[path[step]])
            loss -= math.log(_fit(predictor, error, outputs[path[step]], score, sign, rate))
    return loss


@njit(fastmath=FASTMATH, nogil=True, cache=True, inline="always")
def _learn(
    predictor: np.ndarray,
    error: np.ndarray,
    outputs: np.ndarray,
    label: int,
    negatives: np.ndarray,
    paths: np.ndarray,
    codes: np.ndarray,
    place: tuple[int, int, int],
    scores: np.ndarray,
    share: float,
    rate: float,
) -> float:
    """Everything that a predictor is held against; `error` becomes what the predictor's words are to be changed by.

    Args:
        place: row, block, and the word to be predicted within it.
    """
    row, block, column = place
    for d in range(len(error)):
        error[d] = 0.0
    if len(paths) > 0:
        return _along_path(predictor, error, outputs, paths[row, block, column], codes[row, block, column], rate)
    return _against_negatives(predictor, error, outputs, label, negatives[row, block], scores, share, rate)


@njit(nogil=True, cache=True, inline="always")
def _fetch_next(outputs: np.ndarray, label: int, negatives: np.ndarray) -> None:
    """Rows that the next word needs, which are far apart, are under way while this one learns."""
    if label != IGNORED:
        fetch(outputs, label)
        for k in range(len(negatives)):
            fetch(outputs, negatives[k])


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def word2vec_sgd_kernel(
    words: np.ndarray,
    outputs: np.ndarray,
    ids: np.ndarray,
    real: np.ndarray,
    labels: np.ndarray,
    windows: np.ndarray,
    negatives: np.ndarray,
    paths: np.ndarray,
    codes: np.ndarray,
    share: float,
    rate: float,
    average: bool,
) -> float:
    """Descend along rows of text, word by word; the summed loss, each word's as it was found.

    Args:
        words, outputs: (vocabulary, dim) and (rows, dim) float32 tables; updated.
        ids: (rows, length) int64.
        real: (rows, length) bool, where there is a word.
        labels: (rows, length) what is to be predicted, -100 for nothing.
        windows: (rows, length) how far to look to either side.
        negatives: (rows, blocks, k); of 0 rows for hierarchical softmax.
        paths, codes: (rows, blocks, size, depth), nodes (-1 behind the end) and which way to go; of 0 rows for negative
            sampling.
        share: what a negative counts.
        rate: learning rate.
        average: continuous bag of words instead of skip-gram.
    """
    rows, length = ids.shape
    tree = len(paths) > 0
    size = length // (paths.shape[1] if tree else negatives.shape[1])
    mean, error = np.zeros(words.shape[1], np.float32), np.zeros(words.shape[1], np.float32)
    scores = np.zeros(0 if tree else negatives.shape[2], np.float32)
    loss = 0.0
    for row in range(rows):
        for place in range(length):
            label = labels[row, place]
            if label == IGNORED:
                continue
            block, column = place // size, place % size
            if not tree and place + 1 < length:
                _fetch_next(outputs, labels[row, place + 1], negatives[row, (place + 1) // size])
            start, stop = max(0, place - windows[row, place]), min(length, place + windows[row, place] + 1)
            near = 0
            for d in range(len(mean)):
                mean[d] = 0.0
            for other in range(start, stop):
                if other == place or not real[row, other]:
                    continue
                near += 1
                word = words[ids[row, other]]
                if average:
                    _add(mean, word)
                else:
                    loss += _learn(
                        word, error, outputs, label, negatives, paths, codes, (row, block, column), scores, share, rate
                    )
                    _add(word, error)
            if not average or near == 0:
                continue
            share_of_one = np.float32(1.0) / np.float32(near)
            for d in range(len(mean)):
                mean[d] *= share_of_one
            loss += _learn(
                mean, error, outputs, label, negatives, paths, codes, (row, block, column), scores, share, rate
            )
            for other in range(start, stop):
                if other != place and real[row, other]:
                    _add(words[ids[row, other]], error)
    return loss
