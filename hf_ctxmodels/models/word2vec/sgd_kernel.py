"""SGD on the word2vec loss, word by word, compiled for the CPU by numba (extra `words`).

A word takes so few operations that gathering and scattering its vectors for dense products would cost as much as the
products. The kernel updates the tables in place instead, and the negatives of a block stay in the cache. Each word uses
the updates of the previous word, as in the released code (Mikolov et al. 2013b).
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hf_ctxmodels.architectures.static_embeddings import FASTMATH
from hf_ctxmodels.core.constants import IGNORE_INDEX

_MIN_PROBABILITY = 2.0**-24  # lower bound in the reported loss
_CACHE_LINE = 16  # float32 numbers
_FOR_WRITING, _KEEP_IN_CACHE, _DATA = 1, 3, 1  # arguments of LLVM's prefetch instruction


@intrinsic
def _prefetch(context: Any, table: Any, row: Any, column: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        pointer = cgutils.get_item_pointer(target, builder, signature.args[0], array, arguments[1:], wraparound=False)
        address, number = builder.bitcast(pointer, ir.IntType(8).as_pointer()), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [address, *(number(value) for value in (_FOR_WRITING, _KEEP_IN_CACHE, _DATA))])
        return target.get_dummy_value()

    return types.void(table, row, column), generate


@njit(nogil=True, cache=True, inline="always")
def _prefetch_row(table: np.ndarray, row: int) -> None:
    for column in range(0, table.shape[1], _CACHE_LINE):
        _prefetch(table, row, column)


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

    `sign` is 1.0 for a positive pair and -1.0 for a negative one. Returns the probability of the correct class.
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
    """Predict `label`, at a (row, block, column), from one predictor; sets `error` to the predictor's update."""
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
    block_size: int,
    negative_weight: float,
    rate: float,
    average: bool,
) -> float:
    """Update the float32 tables word by word; returns the summed loss, where each word's loss precedes its update.

    Arguments as in `window_prediction.TextBatch`; `negatives` has 0 rows for hierarchical softmax, `paths` and `codes`
    have 0 rows for negative sampling.
    """
    rows, length = ids.shape
    mean, error = np.zeros(words.shape[1], np.float32), np.zeros(words.shape[1], np.float32)
    scores, context = np.zeros(negatives.shape[2], np.float32), np.zeros(length, np.int64)
    loss = 0.0
    for row in range(rows):
        for position in range(length):
            label = labels[row, position]
            if label == IGNORE_INDEX:
                continue
            following = position + 1
            if len(negatives) > 0 and following < length and labels[row, following] != IGNORE_INDEX:
                _prefetch_row(outputs, labels[row, following])
                for k in range(negatives.shape[2]):
                    _prefetch_row(outputs, negatives[row, following // block_size, k])
            index, window = (row, position // block_size, position % block_size), windows[row, position]
            size = 0
            for neighbor in range(max(0, position - window), min(length, following + window)):
                if neighbor != position and is_token[row, neighbor]:
                    context[size] = ids[row, neighbor]
                    size += 1
            if average and size > 0:
                for d in range(len(mean)):
                    mean[d] = 0.0
                for k in range(size):
                    _add(mean, words[context[k]])
                scale = np.float32(1.0) / np.float32(size)
                for d in range(len(mean)):
                    mean[d] *= scale
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
