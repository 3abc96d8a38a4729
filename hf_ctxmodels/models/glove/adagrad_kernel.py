"""AdaGrad on single cells of a co-occurrence matrix, compiled for the CPU by numba (extra `words`).

The released code of GloVe also updates cell by cell (Pennington et al. 2014, section 4.2); its sums of squares start at
1, exclude the present gradient, and add the squares of the gradients times the learning rate. With tensors, the
gradients of a batch would have to be sorted by words before AdaGrad can square their sums, which takes most of the
time.
"""

import math

import numpy as np
from numba import njit

from hf_ctxmodels.architectures.static_embeddings import FASTMATH

_EPSILON = np.float32(1e-10)  # torch.optim.Adagrad's


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def glove_adagrad_kernel(
    words: np.ndarray,
    contexts: np.ndarray,
    word_bias: np.ndarray,
    context_bias: np.ndarray,
    word_squares: np.ndarray,
    context_squares: np.ndarray,
    word_bias_squares: np.ndarray,
    context_bias_squares: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    x_max: float,
    alpha: float,
    rate: float,
) -> float:
    """Update the tables cell by cell; returns the summed loss, where each cell's loss precedes its update.

    The first eight arrays are updated: (vocabulary, dim) float32 tables, (vocabulary, 1) biases, and AdaGrad's sums of
    their squared gradients. `rows` and `columns` are the (cells,) ids of words and contexts, `values` their float32
    counts, above 0.
    """
    loss = 0.0
    for cell in range(len(rows)):
        i, j = rows[cell], columns[cell]
        word, context, word_square, context_square = words[i], contexts[j], word_squares[i], context_squares[j]
        error = word_bias[i, 0] + context_bias[j, 0] - math.log(values[cell])
        product = np.float32(0.0)
        for d in range(len(word)):
            product += word[d] * context[d]
        error += product
        weight = min(values[cell] / x_max, 1.0) ** alpha
        loss += 0.5 * weight * error * error
        slope = np.float32(weight * error)
        for d in range(len(word)):
            word_gradient, context_gradient = slope * context[d], slope * word[d]
            word_square[d] += word_gradient * word_gradient
            context_square[d] += context_gradient * context_gradient
            word[d] -= rate * word_gradient / (np.sqrt(word_square[d]) + _EPSILON)
            context[d] -= rate * context_gradient / (np.sqrt(context_square[d]) + _EPSILON)
        word_bias_squares[i, 0] += slope * slope
        context_bias_squares[j, 0] += slope * slope
        word_bias[i, 0] -= rate * slope / (np.sqrt(word_bias_squares[i, 0]) + _EPSILON)
        context_bias[j, 0] -= rate * slope / (np.sqrt(context_bias_squares[j, 0]) + _EPSILON)
    return loss
