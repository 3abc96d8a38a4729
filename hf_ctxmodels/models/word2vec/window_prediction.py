"""The losses of word2vec (Mikolov et al. 2013a, b) as dense matrix products.

Each row of text is split into blocks of adjacent words. A block is a grid of *predictors* (skip-gram: all words in the
block's windows; continuous bag of words: the mean of each word's context) and *columns* (negative sampling: the target
words and the block's shared negatives; hierarchical softmax: the inner nodes on the targets' paths). Each cell is one
logistic regression with a target and a weight, 0 for unrelated pairs. A block thus takes three matrix products, and
each vector is read and written once instead of once per pair. This extends the sharing of negatives of Ji et al. 2016
(arXiv 1604.04661) to several adjacent center words. On a CPU, updates word by word (`sgd_kernel`) are faster.
"""

import importlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError

_MAX_BELOW_ONE = 1 - 2.0**-24  # largest float32 below 1


@dataclass
class Blocks:
    """Grids of logistic regressions.

    Attributes:
        words: (blocks, reach) ids of the words in the block's windows; any id where `averages` or `weights` is 0.
        averages: (blocks, predictors, reach) weights of each predictor's mean; None if the predictors are words.
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

    def select(self, start: int, stop: int) -> "Blocks":
        """Blocks [start, stop)."""
        return Blocks(*(None if tensor is None else tensor[start:stop] for tensor in vars(self).values()))  # type: ignore[arg-type]


@dataclass
class CenterWords:
    """Center words and their contexts, in blocks.

    Attributes:
        words: (blocks, reach) ids; `size` center words with `window` words on either side.
        labels: (blocks, size) target ids; -100 is ignored.
        context: (blocks, size, reach) 1.0 for words in the window of a center word.
        output_arguments: [negatives] or [paths, codes] of each block.
    """

    words: Tensor
    labels: Tensor
    context: Tensor
    output_arguments: list[Tensor]


def split_into_blocks(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    windows: Tensor | None,
    window: int,
    output_arguments: list[Tensor],
    dtype: torch.dtype,
) -> CenterWords:
    """Split rows into blocks of equal size, without blocks that have no labels.

    The first blocks of all rows precede the second blocks, and so on: blocks that are updated together are from
    different rows and share few words.

    Args:
        input_ids, attention_mask, labels: (batch, length).
        windows: (batch, length) number of context words on either side; None for `window`.
        window: The maximum window.
        output_arguments: (batch, blocks per row, ...) tensors.
        dtype: Data type of `context`.

    Raises:
        CtxError: The length is not a multiple of the number of blocks.
    """
    blocks_per_row = output_arguments[0].shape[1]
    size = _block_size(input_ids, output_arguments)
    reach = size + 2 * window

    def with_margins(rows: Tensor) -> Tensor:
        return F.pad(rows, (window, window)).unfold(1, reach, size).transpose(0, 1).flatten(0, 1)

    def without_margins(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (blocks_per_row, size)).transpose(0, 1).flatten(0, 1)

    tokens = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).to(input_ids.dtype)
    words, is_token, labels = with_margins(input_ids), with_margins(tokens) != 0, without_margins(labels)
    radius = torch.full_like(labels, window) if windows is None else without_margins(windows)
    columns = torch.arange(reach, device=words.device)
    distance = (columns - window - columns[:size, None]).abs()
    in_window = (distance > 0) & (distance <= radius[:, :, None])
    context = in_window & is_token[:, None] & (labels != IGNORE_INDEX)[:, :, None]
    output_arguments = [tensor.transpose(0, 1).flatten(0, 1) for tensor in output_arguments]
    has_labels = (labels != IGNORE_INDEX).any(1)
    if not bool(has_labels.all()):
        words, labels, context = words[has_labels], labels[has_labels], context[has_labels]
        output_arguments = [tensor[has_labels] for tensor in output_arguments]
    return CenterWords(words, labels, context.to(dtype), output_arguments)


def _block_size(ids: Tensor, output_arguments: list[Tensor]) -> int:
    """Number of center words per block."""
    length, blocks_per_row = ids.shape[1], output_arguments[0].shape[1]
    if length % blocks_per_row:
        raise CtxError(f"A row of {length} columns cannot be split into {blocks_per_row} equal blocks.")
    return length // blocks_per_row


def negative_sampling_grid(centers: CenterWords, number: float, average: bool) -> Blocks:
    """Grids of the targets and the block's negatives (Mikolov et al. 2013b, section 2.2).

    Each of the block's k negatives has the weight `number` / k, or 0 if it equals the target.

    Args:
        centers: With `output_arguments` = [negatives], (blocks, k) ids.
        number: Number of negatives per pair.
        average: Continuous bag of words instead of skip-gram.
    """
    labels, context, (negatives,) = centers.labels, centers.context, centers.output_arguments
    columns = torch.cat([labels.clamp(min=0), negatives], 1)
    negative_weights = (labels[:, :, None] != negatives[:, None, :]).to(context.dtype) * (number / negatives.shape[1])
    if average:
        has_context = (context.sum(-1) > 0).to(context.dtype)
        weights = torch.cat([torch.diag_embed(has_context), negative_weights * has_context[:, :, None]], 2)
    else:
        weights = torch.cat([context.transpose(1, 2), context.transpose(1, 2) @ negative_weights], 2)
    targets = (torch.arange(columns.shape[1], device=columns.device) < labels.shape[1]).to(context.dtype)
    return Blocks(
        words=centers.words,
        averages=_averages(context) if average else None,
        columns=columns,
        targets=targets.expand(len(columns), 1, -1),
        weights=weights,
    )


def hierarchical_grid(centers: CenterWords, average: bool) -> Blocks:
    """Grids of the inner nodes on the paths to the targets (Mikolov et al. 2013b, section 2.1).

    Args:
        centers: With `output_arguments` = [paths, codes], (blocks, size, depth): rows of the output table, -1 after
            the path's end, and branches, 0 or 1. Branch 0 has the target 1, as in the released code.
        average: Continuous bag of words instead of skip-gram.
    """
    context, (paths, codes) = centers.context, centers.output_arguments
    is_node = (paths >= 0).to(context.dtype)
    weights = torch.diag_embed((context.sum(-1) > 0).to(context.dtype)) if average else context.transpose(1, 2)
    return Blocks(
        words=centers.words,
        averages=_averages(context) if average else None,
        columns=paths.clamp(min=0).flatten(1),
        targets=(codes == 0).to(context.dtype).flatten(1)[:, None],
        weights=(weights[..., None] * is_node[:, None]).flatten(2),
    )


def _averages(context: Tensor) -> Tensor:
    return context / context.sum(-1, keepdim=True).clamp(min=1)


def _predictors(blocks: Blocks, vectors: Tensor) -> Tensor:
    """(blocks, reach, dim) -> (blocks, predictors, dim)."""
    return vectors if blocks.averages is None else torch.bmm(blocks.averages, vectors)


def summed_loss(blocks: Blocks, words: Tensor, outputs: Tensor) -> Tensor:
    """Weighted cross-entropy in nats summed over all cells; differentiable.

    Each word of a mean gets the whole gradient of the mean, not divided by the number of words, as in the released
    code.

    Args:
        words, outputs: (vocabulary, dim) and (outputs, dim) tables.
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
        rate: Learning rate for the gradient of the sum.
    """
    vectors = F.embedding(blocks.words, words)
    predictors = _predictors(blocks, vectors)
    columns = F.embedding(blocks.columns, outputs)
    signs, weights = 2 * blocks.targets.float() - 1, blocks.weights.float()
    error_probabilities = torch.bmm(predictors, columns.transpose(1, 2)).float().mul_(-signs).sigmoid_()
    loss = -torch.dot(torch.log1p(-error_probabilities.clamp(max=_MAX_BELOW_ONE)).flatten(), weights.flatten())
    errors = error_probabilities.mul_(weights).mul_(signs * rate).to(columns.dtype)
    word_updates = torch.bmm(errors, columns)
    output_updates = torch.bmm(errors.transpose(1, 2), predictors)
    if blocks.averages is not None:
        word_updates = torch.bmm((blocks.averages != 0).to(word_updates.dtype).transpose(1, 2), word_updates)
    _add_rows(words, blocks.words, word_updates)
    _add_rows(outputs, blocks.columns, output_updates)
    return loss


@dataclass
class TextBatch:
    """A batch of text, for updates word by word.

    Attributes:
        ids, mask, labels, windows: (batch, length), see `split_into_blocks`.
        output_arguments: [negatives], (batch, blocks, k); or [paths, codes], (batch, blocks, size, depth).
    """

    ids: Tensor
    mask: Tensor | None
    labels: Tensor
    windows: Tensor | None
    output_arguments: list[Tensor]


def sgd_step_by_words(
    text: TextBatch, words: Tensor, outputs: Tensor, rate: float, window: int, number: float, average: bool
) -> float:
    """Compute `sgd_step` word by word, compiled; returns the summed loss, where each word's loss precedes its update.

    Args:
        words, outputs: The tables, float32 on the CPU; updated.
        rate: Learning rate.
        window: The window without `text.windows`.
        number: Number of negatives per pair.
        average: Continuous bag of words instead of skip-gram.

    Raises:
        CtxError: The length is not a multiple of the number of blocks.
    """
    kernels = importlib.import_module("hf_ctxmodels.models.word2vec.sgd_kernel")  # numba takes a second to import
    _block_size(text.ids, text.output_arguments)  # the kernel does not check it
    negatives = torch.zeros(0, 1, 1, dtype=torch.long)
    paths = codes = torch.zeros(0, 1, 1, 1, dtype=torch.long)
    negative_weight = 1.0
    if len(text.output_arguments) == 2:
        paths, codes = text.output_arguments
    else:
        (negatives,) = text.output_arguments
        negative_weight = number / negatives.shape[2]
    mask = torch.ones_like(text.ids) if text.mask is None else text.mask
    windows = torch.full_like(text.ids, window) if text.windows is None else text.windows
    return kernels.word2vec_sgd_kernel(
        words.numpy(),
        outputs.numpy(),
        *map(np.ascontiguousarray, (text.ids, mask != 0, text.labels, windows, negatives, paths, codes)),
        np.float32(negative_weight),
        np.float32(rate),
        average,
    )


def _add_rows(table: Tensor, rows: Tensor, changes: Tensor) -> None:
    table.index_add_(0, rows.flatten(), changes.flatten(0, 1).to(table.dtype))
