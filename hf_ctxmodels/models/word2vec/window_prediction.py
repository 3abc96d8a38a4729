"""Words predicted from the words around them (Mikolov et al. 2013a, b), many at a time as dense matrix products.

Rows of text are cut into blocks of neighbouring words. A block is a grid: its *predictors* (skip-gram: the words in
reach of the block; continuous bag of words: the mean around each word) against its *columns* (negative sampling: the
words to be predicted, then the negatives that the block shares; hierarchical softmax: the inner nodes on their paths).
Each cell is one logistic regression with a target and a weight, 0 where the two have nothing to do with each other. So
a block costs three matrix products, and each vector is read and written once instead of once for every pair: the
sharing of negatives of Ji et al. 2016 (arXiv 1604.04661), over several neighbouring centre words instead of one. On a
CPU `window_kernels` does the same word by word, which is faster there.
"""

import importlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.core.errors import CtxError

_CERTAIN = 1 - 2.0**-24  # the largest float32 below 1


@dataclass
class Blocks:
    """Grids of logistic regressions.

    Attributes:
        words: (blocks, reach) ids of the words in reach; any id where `averages` or `weights` is 0.
        averages: (blocks, predictors, reach): what of the words each predictor is the mean of; None where the
            predictors are the words themselves.
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
    """The words to be predicted and what is in their reach, block by block.

    Attributes:
        words: (blocks, reach) ids; `size` centre words with `window` words on either side.
        labels: (blocks, size) ids of what is to be predicted, -100 for nothing.
        near: (blocks, size, reach) 1.0 where a word is in the window of a centre word.
        given: Further tensors, of each block.
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
    """Cut rows into blocks, all of one size. Blocks without any label are left out.

    The first blocks of all rows come first, then the second ones, and so on: what is updated together is then of
    different rows, and repeats few words.

    Args:
        input_ids, attention_mask, labels: (batch, length).
        windows: (batch, length) how far each centre word looks to either side; None for `window`.
        window: the farthest.
        given: (batch, blocks a row, ...) tensors that say how many blocks a row has.
        dtype: of `near`.

    Raises:
        CtxError: the row's length is no multiple of its number of blocks.
    """
    per_row = given[0].shape[1]
    size = _block_size(input_ids, given)
    reach = size + 2 * window

    def with_margins(rows: Tensor) -> Tensor:
        return F.pad(rows, (window, window)).unfold(1, reach, size).transpose(0, 1).flatten(0, 1)

    def without(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (per_row, size)).transpose(0, 1).flatten(0, 1)

    tokens = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).to(input_ids.dtype)
    words, real, labels = with_margins(input_ids), with_margins(tokens) != 0, without(labels)
    radius = torch.full_like(labels, window) if windows is None else without(windows)
    columns = torch.arange(reach, device=words.device)
    distance = (columns - window - columns[:size, None]).abs()
    near = (distance > 0) & (distance <= radius[:, :, None]) & real[:, None] & (labels != IGNORED)[:, :, None]
    given = [tensor.transpose(0, 1).flatten(0, 1) for tensor in given]
    used = (labels != IGNORED).any(1)
    if not bool(used.all()):
        words, labels, near = words[used], labels[used], near[used]
        given = [tensor[used] for tensor in given]
    return Centres(words, labels, near.to(dtype), given)


def _block_size(ids: Tensor, given: list[Tensor]) -> int:
    """Words of a block."""
    length, per_row = ids.shape[1], given[0].shape[1]
    if length % per_row:
        raise CtxError(f"A row of {length} columns cannot be cut into {per_row} equal blocks.")
    return length // per_row


def negative_sampling_grid(centres: Centres, number: float, average: bool) -> Blocks:
    """The centre words, then the negatives of the block (Mikolov et al. 2013b, section 2.2).

    Each of a pair's `number` negatives is the mean over the block's, but for those that are the word to be predicted.

    Args:
        centres: with the negatives, (blocks, k) ids.
        number: negatives of a pair.
        average: continuous bag of words instead of skip-gram.
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
    """The inner nodes on the paths of the centre words (Mikolov et al. 2013b, section 2.1).

    Args:
        centres: with paths, (blocks, size, depth) rows of the output table, -1 behind the end; and codes, of the same
            shape, which way the path goes, 0 or 1. Way 0 is the target 1, as in the released code.
        average: continuous bag of words instead of skip-gram.
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
    """Weighted cross-entropy in nats over all cells: the plain formula, for autograd.

    The gradient of a mean goes to each of its words whole, not divided by their number, as in the released code.

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
def descend(blocks: Blocks, words: Tensor, outputs: Tensor, rate: float) -> Tensor:
    """One step of gradient descent on `summed_loss`, in place, of the rows concerned alone; what it was before.

    Args:
        words, outputs: the tables; updated.
        rate: learning rate of a pair, as everywhere in the literature: the gradient is that of the sum.
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
    """Rows of text as they are, to be followed word by word.

    Attributes:
        ids, mask, labels, windows: as in `cut`.
        given: [negatives], (batch, blocks, k); or [paths, codes], (batch, blocks, size, depth).
    """

    ids: Tensor
    mask: Tensor | None
    labels: Tensor
    windows: Tensor | None
    given: list[Tensor]


def descend_by_words(
    text: Text, words: Tensor, outputs: Tensor, rate: float, window: int, number: float, average: bool
) -> float:
    """`descend` for each word by itself, compiled; the summed loss, each word's as the descent found it.

    Args:
        words, outputs: the tables, float32 on the CPU; updated.
        rate: learning rate of a pair.
        window: of text without `windows`.
        number: negatives of a pair.
        average: continuous bag of words instead of skip-gram.

    Raises:
        CtxError: as `cut`.
    """
    kernels = importlib.import_module("hf_ctxmodels.models.word2vec.sgd_kernel")  # numba takes a second to import
    _block_size(text.ids, text.given)  # the kernel takes it on trust
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
