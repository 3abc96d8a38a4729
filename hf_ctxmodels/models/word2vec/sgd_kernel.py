"""SGD on the word2vec loss, word by word, compiled for the CPU by numba (extra `words`).

A word takes so few operations that gathering and scattering its vectors for dense products would cost as much as the
products. The kernel updates the tables in place instead, and the negatives that a block shares stay in the cache. Each
word sees the updates of the one before it, as in the released code (Mikolov et al. 2013b).

Called by `window_prediction.sgd_step_by_words` only; the tests compare it with the grids of `window_prediction`.
"""

import math

import numpy as np
from numba import njit

from hf_ctxmodels.architectures.static_embeddings import FASTMATH
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.models.word2vec.prefetch import fetch

_LEAST = 2.0**-24  # lower bound of a probability in the reported loss


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
    """SGD step of one logistic regression: updates `output`, adds the predictor's update to `error`.

    Args:
        score: dot product of `predictor` and `output`.
        sign: 1.0 for a positive pair, -1.0 for a negative one.

    Returns: the probability of the right class.
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
    """Negative sampling for one predictor; each negative has the weight `share`. Returns the loss.

    All scores are computed first, so that the loads of the rows overlap.
    """
    one = np.float32(1.0)
    label_score = _score(predictor, outputs[label])
    for k in range(len(negatives)):
        scores[k] = _score(predictor, outputs[negatives[k]])
    loss = -math.log(_fit(predictor, error, outputs[label], label_score, one, rate))
    others = 1.0  # one logarithm of a product, taken before the product underflows
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
    """Hierarchical softmax for one predictor: the inner nodes on the path to the target. Returns the loss."""
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
    """Predict `label` from one predictor: updates `outputs`, fills `error` with the predictor's update.

    Args:
        place: row, block, and position within the block.
    """
    row, block, column = place
    for d in range(len(error)):
        error[d] = 0.0
    if len(paths) > 0:
        return _along_path(predictor, error, outputs, paths[row, block, column], codes[row, block, column], rate)
    return _against_negatives(predictor, error, outputs, label, negatives[row, block], scores, share, rate)


@njit(nogil=True, cache=True, inline="always")
def _fetch_next(outputs: np.ndarray, label: int, negatives: np.ndarray) -> None:
    """Prefetch the output rows of the next word while the current one is processed."""
    if label != IGNORE_INDEX:
        fetch(outputs, label)
        for k in range(len(negatives)):
            fetch(outputs, negatives[k])


@njit(nogil=True, cache=True, inline="always")
def _gather_context(context: np.ndarray, ids: np.ndarray, real: np.ndarray, position: int, window: int) -> int:
    """Write the ids of the words in a window, its centre left out, to `context`; returns their number."""
    near = 0
    for other in range(max(0, position - window), min(len(ids), position + window + 1)):
        if other != position and real[other]:
            context[near] = ids[other]
            near += 1
    return near


@njit(nogil=True, cache=True, inline="always")
def _average(mean: np.ndarray, words: np.ndarray, context: np.ndarray, near: int) -> None:
    """Fill `mean` with the mean vector of the first `near` words of `context`, at least one."""
    for d in range(len(mean)):
        mean[d] = 0.0
    for k in range(near):
        _add(mean, words[context[k]])
    scale = np.float32(1.0) / np.float32(near)
    for d in range(len(mean)):
        mean[d] *= scale


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
    """Update the tables word by word. Returns the summed loss, each word's before its update.

    Args:
        words, outputs: (vocabulary, dim) and (rows, dim) float32 tables; updated.
        ids: (rows, length) int64.
        real: (rows, length) bool, False at padding.
        labels: (rows, length) target ids, -100 for none.
        windows: (rows, length) context words on either side.
        negatives: (rows, blocks, k); of 0 rows for hierarchical softmax.
        paths, codes: (rows, blocks, size, depth) inner nodes, -1 after the path's end, and branches; of 0 rows for
            negative sampling.
        share: weight of a negative.
        rate: learning rate.
        average: continuous bag of words instead of skip-gram.
    """
    rows, length = ids.shape
    tree = len(paths) > 0
    size = length // (paths.shape[1] if tree else negatives.shape[1])
    mean, error = np.zeros(words.shape[1], np.float32), np.zeros(words.shape[1], np.float32)
    scores, context = np.zeros(0 if tree else negatives.shape[2], np.float32), np.zeros(length, np.int64)
    loss = 0.0
    for row in range(rows):
        for position in range(length):
            label = labels[row, position]
            if label == IGNORE_INDEX:
                continue
            place = row, position // size, position % size
            if not tree and position + 1 < length:
                _fetch_next(outputs, labels[row, position + 1], negatives[row, (position + 1) // size])
            near = _gather_context(context, ids[row], real[row], position, windows[row, position])
            if average and near > 0:
                _average(mean, words, context, near)
                loss += _learn(mean, error, outputs, label, negatives, paths, codes, place, scores, share, rate)
                for k in range(near):
                    _add(words[context[k]], error)
            elif not average:
                for k in range(near):
                    word = words[context[k]]
                    loss += _learn(word, error, outputs, label, negatives, paths, codes, place, scores, share, rate)
                    _add(word, error)
    return loss
