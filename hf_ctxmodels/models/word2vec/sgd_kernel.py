"""SGD on the word2vec loss, word by word, compiled for the CPU by numba (extra `words`).

A word takes so few operations that gathering and scattering its vectors for dense products would cost as much as the
products. The kernel updates the tables in place instead, and the negatives of a block stay in the cache. Each word uses
the updates of the previous word, as in the released code (Mikolov et al. 2013b).

Only `window_prediction.sgd_step_by_words` calls it; the tests compare it with `window_prediction.sgd_step`.
"""

import math

import numpy as np
from numba import njit

from hf_ctxmodels.architectures.static_embeddings import FASTMATH
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.models.word2vec.prefetch import prefetch_row

_MIN_PROBABILITY = 2.0**-24  # lower bound in the reported loss


@njit(nogil=True, cache=True, inline="always")
def _add(vector: np.ndarray, summand: np.ndarray) -> None:
    for d in range(len(vector)):
        vector[d] += summand[d]


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
    """SGD step of one logistic regression: updates `output` and adds the predictor's update to `error`.

    Args:
        score: Dot product of `predictor` and `output`.
        sign: 1.0 for a positive pair, -1.0 for a negative one.

    Returns:
        Probability of the correct class.
    """
    error_probability = np.float32(1.0) / (np.float32(1.0) + np.exp(sign * score))
    step = rate * sign * error_probability
    for d in range(len(output)):
        previous = output[d]
        error[d] += step * previous
        output[d] = previous + step * predictor[d]
    return max(1.0 - np.float64(error_probability), _MIN_PROBABILITY)


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def _negative_sampling_step(
    predictor: np.ndarray,
    error: np.ndarray,
    outputs: np.ndarray,
    label: int,
    negatives: np.ndarray,
    scores: np.ndarray,
    negative_weight: float,
    rate: float,
) -> float:
    """Negative sampling for one predictor; returns the loss.

    All scores are computed first, so that the loads of the rows overlap.
    """
    one = np.float32(1.0)
    label_score = _score(predictor, outputs[label])
    for k in range(len(negatives)):
        scores[k] = _score(predictor, outputs[negatives[k]])
    loss = -math.log(_fit(predictor, error, outputs[label], label_score, one, rate))
    product = 1.0  # of probabilities; its logarithm is taken before it underflows
    for k in range(len(negatives)):
        if negatives[k] != label:
            product *= _fit(predictor, error, outputs[negatives[k]], scores[k], -one, rate * negative_weight)
            if product < 1e-200:
                loss -= negative_weight * math.log(product)
                product = 1.0
    return loss - negative_weight * math.log(product)


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def _hierarchical_softmax_step(
    predictor: np.ndarray, error: np.ndarray, outputs: np.ndarray, path: np.ndarray, codes: np.ndarray, rate: float
) -> float:
    """Hierarchical softmax for one predictor over the path to the target; returns the loss."""
    loss = 0.0
    for step in range(len(path)):
        if path[step] >= 0:
            sign = np.float32(1.0 - 2.0 * codes[step])
            score = _score(predictor, outputs[path[step]])
            loss -= math.log(_fit(predictor, error, outputs[path[step]], score, sign, rate))
    return loss


@njit(fastmath=FASTMATH, nogil=True, cache=True, inline="always")
def _sgd_step(
    predictor: np.ndarray,
    error: np.ndarray,
    outputs: np.ndarray,
    label: int,
    negatives: np.ndarray,
    paths: np.ndarray,
    codes: np.ndarray,
    position: tuple[int, int, int],
    scores: np.ndarray,
    negative_weight: float,
    rate: float,
) -> float:
    """Predict `label` from one predictor: updates `outputs`, and sets `error` to the predictor's update.

    Args:
        position: Row, block, and column within the block.
    """
    row, block, column = position
    for d in range(len(error)):
        error[d] = 0.0
    if len(paths) > 0:
        return _hierarchical_softmax_step(
            predictor, error, outputs, paths[row, block, column], codes[row, block, column], rate
        )
    return _negative_sampling_step(
        predictor, error, outputs, label, negatives[row, block], scores, negative_weight, rate
    )


@njit(nogil=True, cache=True, inline="always")
def _prefetch_outputs(outputs: np.ndarray, label: int, negatives: np.ndarray) -> None:
    """Prefetch the output rows of the next word while the current word is processed."""
    if label != IGNORE_INDEX:
        prefetch_row(outputs, label)
        for k in range(len(negatives)):
            prefetch_row(outputs, negatives[k])


@njit(nogil=True, cache=True, inline="always")
def _gather_context(context: np.ndarray, ids: np.ndarray, is_token: np.ndarray, position: int, window: int) -> int:
    """Copy the ids in a window, without the center word, to `context`; returns their number."""
    size = 0
    for neighbor in range(max(0, position - window), min(len(ids), position + window + 1)):
        if neighbor != position and is_token[neighbor]:
            context[size] = ids[neighbor]
            size += 1
    return size


@njit(nogil=True, cache=True, inline="always")
def _average(mean: np.ndarray, words: np.ndarray, context: np.ndarray, size: int) -> None:
    """Set `mean` to the mean vector of the first `size` > 0 words of `context`."""
    for d in range(len(mean)):
        mean[d] = 0.0
    for k in range(size):
        _add(mean, words[context[k]])
    scale = np.float32(1.0) / np.float32(size)
    for d in range(len(mean)):
        mean[d] *= scale


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def word2vec_sgd_kernel(
    words: np.ndarray,
    outputs: np.ndarray,
    ids: np.ndarray,
    is_token: np.ndarray,
    labels: np.ndarray,
    windows: np.ndarray,
    negatives: np.ndarray,
    paths: np.ndarray,
    codes: np.ndarray,
    negative_weight: float,
    rate: float,
    average: bool,
) -> float:
    """Update the tables word by word; returns the summed loss, where each word's loss precedes its update.

    Args:
        words, outputs: (vocabulary, dim) and (outputs, dim) float32 tables; updated.
        ids: (rows, length) int64.
        is_token: (rows, length) bool, False at padding.
        labels: (rows, length) target ids; -100 is ignored.
        windows: (rows, length) number of context words on either side.
        negatives: (rows, blocks, k); 0 rows for hierarchical softmax.
        paths, codes: (rows, blocks, size, depth) inner nodes, -1 after the path's end, and branches; 0 rows for
            negative sampling.
        negative_weight: Weight of a negative sample.
        rate: Learning rate.
        average: Continuous bag of words instead of skip-gram.
    """
    rows, length = ids.shape
    is_hierarchical = len(paths) > 0
    block_size = length // (paths.shape[1] if is_hierarchical else negatives.shape[1])
    mean, error = np.zeros(words.shape[1], np.float32), np.zeros(words.shape[1], np.float32)
    scores, context = np.zeros(0 if is_hierarchical else negatives.shape[2], np.float32), np.zeros(length, np.int64)
    loss = 0.0
    for row in range(rows):
        for position in range(length):
            label = labels[row, position]
            if label == IGNORE_INDEX:
                continue
            index = row, position // block_size, position % block_size
            if not is_hierarchical and position + 1 < length:
                _prefetch_outputs(outputs, labels[row, position + 1], negatives[row, (position + 1) // block_size])
            size = _gather_context(context, ids[row], is_token[row], position, windows[row, position])
            if average and size > 0:
                _average(mean, words, context, size)
                loss += _sgd_step(
                    mean, error, outputs, label, negatives, paths, codes, index, scores, negative_weight, rate
                )
                for k in range(size):
                    _add(words[context[k]], error)
            elif not average:
                for k in range(size):
                    word = words[context[k]]
                    loss += _sgd_step(
                        word, error, outputs, label, negatives, paths, codes, index, scores, negative_weight, rate
                    )
                    _add(word, error)
    return loss
