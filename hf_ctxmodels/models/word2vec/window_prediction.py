"""The losses of word2vec (Mikolov et al. 2013a, b) as dense matrix products.

Rows of text are cut into blocks of adjacent words. A block is a grid: its *predictors* (skip-gram: all words in the
block's windows; continuous bag of words: the mean of each word's context) times its *columns* (negative sampling: the
target words and the negatives that the block shares; hierarchical softmax: the inner nodes on the targets' paths). Each
cell is one logistic regression with a target and a weight, 0 for unrelated pairs. So a block costs three matrix
products, and each vector is read and written once instead of once per pair: the sharing of negatives of Ji et al. 2016
(arXiv 1604.04661), over several adjacent centre words instead of one. On a CPU `sgd_kernel` updates word by word, which
is faster there.
"""

import importlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError

_CERTAIN = 1 - 2.0**-24  # the largest float32 below 1


@dataclass
class Blocks:
    """Grids of logistic regressions.

    Attributes:
        words: (blocks, reach) ids of the words in the block's windows; any id where `averages` or `weights` is 0.
        averages: (blocks, predictors, reach) weights of each predictor's mean; None if predictors are words.
        columns: (blocks, columns) rows of the output table.
        targets: (blocks, 1, columns) 0.0 or 1.0.
        weights: (blocks, predictors, columns).
    """

    words: Tensor
    averages: Tensor | None
    columns: Tensor
    targets: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.words)

    def part(self, start: int, stop: int) -> "Blocks":
        """Blocks [start, stop)."""
        return Blocks(*(None if tensor is None else tensor[start:stop] for tensor in vars(self).values()))  # type: ignore[arg-type]


@dataclass
class Centres:
    """Centre words and their contexts, in blocks.

    Attributes:
        words: (blocks, reach) ids; `size` centre words with `window` words on either side.
        labels: (blocks, size) target ids, -100 for none.
        near: (blocks, size, reach) 1.0 for words in the window of a centre word.
        given: [negatives] or [paths, codes] of each block.
    """

    words: Tensor
    labels: Tensor
    near: Tensor
    given: list[Tensor]


def cut(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    windows: Tensor | None,
    window: int,
    given: list[Tensor],
    dtype: torch.dtype,
) -> Centres:
    """Cut rows into blocks of equal size. Blocks without labels are left out.

    The first blocks of all rows come first, then the second ones, and so on: blocks that are updated together are from
    different rows, and share few words.

    Args:
        input_ids, attention_mask, labels: (batch, length).
        windows: (batch, length) context words on either side; None for `window`.
        window: The largest window.
        given: (batch, blocks per row, ...) tensors.
        dtype: The type of `near`.

    Raises:
        CtxError: The rows' length is no multiple of the number of blocks.
    """
    per_row = given[0].shape[1]
    size = _block_size(input_ids, given)
    reach = size + 2 * window

    def with_margins(rows: Tensor) -> Tensor:
        return F.pad(rows, (window, window)).unfold(1, reach, size).transpose(0, 1).flatten(0, 1)

    def without_margins(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (per_row, size)).transpose(0, 1).flatten(0, 1)

    tokens = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).to(input_ids.dtype)
    words, real, labels = with_margins(input_ids), with_margins(tokens) != 0, without_margins(labels)
    radius = torch.full_like(labels, window) if windows is None else without_margins(windows)
    columns = torch.arange(reach, device=words.device)
    distance = (columns - window - columns[:size, None]).abs()
    near = (distance > 0) & (distance <= radius[:, :, None]) & real[:, None] & (labels != IGNORE_INDEX)[:, :, None]
    given = [tensor.transpose(0, 1).flatten(0, 1) for tensor in given]
    used = (labels != IGNORE_INDEX).any(1)
    if not bool(used.all()):
        words, labels, near = words[used], labels[used], near[used]
        given = [tensor[used] for tensor in given]
    return Centres(words, labels, near.to(dtype), given)


def _block_size(ids: Tensor, given: list[Tensor]) -> int:
    """Number of centre words of a block."""
    length, per_row = ids.shape[1], given[0].shape[1]
    if length % per_row:
        raise CtxError(f"A row of {length} columns cannot be cut into {per_row} equal blocks.")
    return length // per_row


def negative_sampling_grid(centres: Centres, number: float, average: bool) -> Blocks:
    """The targets, then the block's negatives (Mikolov et al. 2013b, section 2.2).

    The block's k negatives, without those equal to the target, have the weight `number` / k each.

    Args:
        centres: With `given` = [negatives], (blocks, k) ids.
        number: Negatives of a pair.
        average: Continuous bag of words instead of skip-gram.
    """
    labels, near, (negatives,) = centres.labels, centres.near, centres.given
    columns = torch.cat([labels.clamp(min=0), negatives], 1)
    other = (labels[:, :, None] != negatives[:, None, :]).to(near.dtype) * (number / negatives.shape[1])
    if average:
        some = (near.sum(-1) > 0).to(near.dtype)
        weights = torch.cat([torch.diag_embed(some), other * some[:, :, None]], 2)
    else:
        weights = torch.cat([near.transpose(1, 2), near.transpose(1, 2) @ other], 2)
    targets = (torch.arange(columns.shape[1], device=columns.device) < labels.shape[1]).to(near.dtype)
    return Blocks(
        centres.words, _averages(near) if average else None, columns, targets.expand(len(columns), 1, -1), weights
    )


def hierarchical_grid(centres: Centres, average: bool) -> Blocks:
    """The inner nodes on the paths to the targets (Mikolov et al. 2013b, section 2.1).

    Args:
        centres: With `given` = [paths, codes], (blocks, size, depth): rows of the output table, -1 after the path's
            end, and branches, 0 or 1. Branch 0 has the target 1, as in the released code.
        average: Continuous bag of words instead of skip-gram.
    """
    near, (paths, codes) = centres.near, centres.given
    real = (paths >= 0).to(near.dtype)
    weights = torch.diag_embed((near.sum(-1) > 0).to(near.dtype)) if average else near.transpose(1, 2)
    return Blocks(
        words=centres.words,
        averages=_averages(near) if average else None,
        columns=paths.clamp(min=0).flatten(1),
        targets=(codes == 0).to(near.dtype).flatten(1)[:, None],
        weights=(weights[..., None] * real[:, None]).flatten(2),
    )


def _averages(near: Tensor) -> Tensor:
    return near / near.sum(-1, keepdim=True).clamp(min=1)


def _predictors(blocks: Blocks, vectors: Tensor) -> Tensor:
    """(blocks, reach, dim) -> (blocks, predictors, dim)."""
    return vectors if blocks.averages is None else torch.bmm(blocks.averages, vectors)


def summed_loss(blocks: Blocks, words: Tensor, outputs: Tensor) -> Tensor:
    """Weighted cross-entropy in nats over all cells, for autograd.

    Each word of a mean has the mean's whole gradient, not divided by the number of words, as in the released code.

    Args:
        words, outputs: (vocabulary, dim) and (rows, dim) tables.
    """
    vectors = F.embedding(blocks.words, words)
    predictors = _predictors(blocks, vectors)
    if blocks.averages is not None:
        sums = torch.bmm((blocks.averages != 0).to(vectors.dtype), vectors)
        predictors = sums + (predictors - sums).detach()
    scores = torch.bmm(predictors, F.embedding(blocks.columns, outputs).transpose(1, 2)).float()
    losses = F.binary_cross_entropy_with_logits(scores, blocks.targets.expand_as(scores).float(), reduction="none")
    return (losses * blocks.weights).sum()


@torch.no_grad()
def sgd_step(blocks: Blocks, words: Tensor, outputs: Tensor, rate: float) -> Tensor:
    """One in-place SGD step on `summed_loss`; returns the loss before it.

    Args:
        words, outputs: The tables; updated.
        rate: Learning rate of a pair: the gradient is that of the sum.
    """
    vectors = F.embedding(blocks.words, words)
    predictors = _predictors(blocks, vectors)
    columns = F.embedding(blocks.columns, outputs)
    signs, weights = 2 * blocks.targets.float() - 1, blocks.weights.float()
    wrong = torch.bmm(predictors, columns.transpose(1, 2)).float().mul_(-signs).sigmoid_()
    loss = -torch.dot(torch.log1p(-wrong.clamp(max=_CERTAIN)).flatten(), weights.flatten())
    errors = wrong.mul_(weights).mul_(signs * rate).to(columns.dtype)
    to_predictors = torch.bmm(errors, columns)
    to_columns = torch.bmm(errors.transpose(1, 2), predictors)
    if blocks.averages is not None:
        to_predictors = torch.bmm((blocks.averages != 0).to(to_predictors.dtype).transpose(1, 2), to_predictors)
    _add_rows(words, blocks.words, to_predictors)
    _add_rows(outputs, blocks.columns, to_columns)
    return loss


@dataclass
class Text:
    """Rows of text, for updates word by word.

    Attributes:
        ids, mask, labels, windows: As in `cut`.
        given: [negatives], (batch, blocks, k); or [paths, codes], (batch, blocks, size, depth).
    """

    ids: Tensor
    mask: Tensor | None
    labels: Tensor
    windows: Tensor | None
    given: list[Tensor]


def sgd_step_by_words(
    text: Text, words: Tensor, outputs: Tensor, rate: float, window: int, number: float, average: bool
) -> float:
    """`sgd_step` word by word, compiled. Returns the summed loss, each word's before its update.

    Args:
        words, outputs: The tables, float32 on the CPU; updated.
        rate: Learning rate of a pair.
        window: The window of text without `windows`.
        number: Negatives of a pair.
        average: Continuous bag of words instead of skip-gram.

    Raises:
        CtxError: The rows' length is no multiple of the number of blocks.
    """
    kernels = importlib.import_module("hf_ctxmodels.models.word2vec.sgd_kernel")  # numba takes a second to import
    _block_size(text.ids, text.given)  # a check, which the kernel lacks
    tree = len(text.given) == 2
    none = np.zeros((0, 1, 1, 1), dtype=np.int64)
    negatives, (paths, codes) = (none[..., 0], text.given) if tree else (text.given[0], (none, none))
    mask = torch.ones_like(text.ids) if text.mask is None else text.mask
    windows = torch.full_like(text.ids, window) if text.windows is None else text.windows
    return kernels.word2vec_sgd_kernel(
        *(table.numpy() for table in (words, outputs)),
        *(np.ascontiguousarray(rows) for rows in (text.ids, mask != 0, text.labels, windows, negatives, paths, codes)),
        np.float32(1.0 if tree else number / negatives.shape[2]),
        np.float32(rate),
        average,
    )


def _add_rows(table: Tensor, rows: Tensor, changes: Tensor) -> None:
    table.index_add_(0, rows.flatten(), changes.flatten(0, 1).to(table.dtype))
