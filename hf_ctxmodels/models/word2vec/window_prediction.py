"""The losses of word2vec (Mikolov et al. 2013a, b) as dense matrix products.

Each row of text is split into blocks of adjacent words. A block is a grid of *predictors* (skip-gram: all words in the
block's windows; continuous bag of words: the mean of each word's context) and *columns* (negative sampling: the target
words and the block's shared negatives; hierarchical softmax: the inner nodes on the targets' paths). Each cell is one
logistic regression with a target and a weight, 0 for unrelated pairs. A block thus takes three matrix products, and
each vector is read and written once instead of once per pair. This extends the sharing of negatives of Ji et al. 2016
(arXiv 1604.04661) to several adjacent center words. On a CPU, updates word by word (`sgd_kernel`) are faster. With the
full softmax, the normalization over the vocabulary is computed once per predictor instead of once per pair.
"""

import importlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, on_host, select_true
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy

SOFTMAX_BLOCK = 16  # center words per block of the full softmax
_MAX_BELOW_ONE = 1 - 2.0**-24  # largest float32 below 1


@dataclass
class TextBatch:
    """A (batch, length) batch of text with its targets, in `blocks` blocks of `size` adjacent words per row.

    Attributes:
        is_token: False at padding.
        labels: Target ids; -100 is ignored.
        windows: Number of context words on either side.
        output_arguments: "negatives", (batch, blocks, k); or "paths" and "codes", (batch, blocks, size, depth): rows of
            the output table, -1 after a path's end, and branches, 0 or 1; or empty for the full softmax.
    """

    ids: Tensor
    is_token: Tensor
    labels: Tensor
    windows: Tensor
    output_arguments: dict[str, Tensor]

    @property
    def block_size(self) -> int:
        """Number of center words per block; raises CtxError if blocks do not divide the length."""
        if not self.output_arguments:
            return SOFTMAX_BLOCK
        length, blocks_per_row = self.ids.shape[1], next(iter(self.output_arguments.values())).shape[1]
        if length % blocks_per_row:
            raise CtxError(f"A row of {length} columns cannot be split into {blocks_per_row} equal blocks.")
        return length // blocks_per_row

    def padded(self) -> "TextBatch":
        """The batch with rows of a multiple of `SOFTMAX_BLOCK` words."""
        margin = (0, -self.ids.shape[1] % SOFTMAX_BLOCK)
        return TextBatch(
            F.pad(self.ids, margin),
            F.pad(self.is_token, margin, value=False),
            F.pad(self.labels, margin, value=IGNORE_INDEX),
            F.pad(self.windows, margin, value=1),
            self.output_arguments,
        )


@dataclass
class Blocks:
    """Grids of logistic regressions, or of classifications by the full softmax.

    Attributes:
        words: (blocks, reach) ids of the words in the block's windows; any id where `averages` or `weights` is 0.
        averages: (blocks, predictors, reach) weights of each predictor's mean; None if the predictors are words.
        columns: (blocks, columns) rows of the output table; for the full softmax, of the labels.
        targets: (blocks, 1, columns) 0.0 or 1.0; None for the full softmax.
        weights: (blocks, predictors, columns).
    """

    words: Tensor
    averages: Tensor | None
    columns: Tensor
    targets: Tensor | None
    weights: Tensor

    def __len__(self) -> int:
        return len(self.words)

    def select(self, start: int, stop: int) -> "Blocks":
        """Blocks [start, stop)."""
        return Blocks(*(None if tensor is None else tensor[start:stop] for tensor in vars(self).values()))  # type: ignore[arg-type]

    def predictors(self, vectors: Tensor) -> Tensor:
        """(blocks, reach, dim) word vectors -> (blocks, predictors, dim)."""
        return vectors if self.averages is None else torch.bmm(self.averages, vectors)


def build_blocks(text: TextBatch, window: int, number: float, average: bool, dtype: torch.dtype) -> Blocks:
    """Grids of the blocks that have labels.

    The first blocks of all rows precede the second blocks, and so on: blocks that are updated together are from
    different rows and share few words. With negative sampling (Mikolov et al. 2013b, section 2.2), each of a block's k
    negatives has the weight `number` / k, or 0 if it equals the target. With hierarchical softmax (section 2.1),
    branch 0 has the target 1, as in the released code. The full softmax (section 2, equation 2) has only the labels as
    columns.

    Args:
        window: Maximum of `text.windows`.
        number: Number of negatives per pair.
        average: Continuous bag of words instead of skip-gram.
        dtype: Data type of targets and weights.
    """
    text = text if text.output_arguments else text.padded()
    size = text.block_size
    reach = size + 2 * window

    def with_margins(rows: Tensor) -> Tensor:
        return F.pad(rows, (window, window)).unfold(1, reach, size).transpose(0, 1).flatten(0, 1)

    def without_margins(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (-1, size)).transpose(0, 1).flatten(0, 1)

    words, is_token = with_margins(text.ids), with_margins(text.is_token)
    labels, windows = on_host(without_margins, text.labels), without_margins(text.windows)
    output_arguments = {name: tensor.transpose(0, 1).flatten(0, 1) for name, tensor in text.output_arguments.items()}
    positions = torch.arange(reach, device=words.device)
    distance = (positions - window - positions[:size, None]).abs()
    has_label = labels != IGNORE_INDEX
    in_window = (distance > 0) & (distance <= windows[:, :, None])
    context = (in_window & is_token[:, None] & has_label[:, :, None]).to(dtype)
    selected = on_host(lambda targets: (targets != IGNORE_INDEX).any(1), labels)
    if not bool(host_copy(selected).all()):
        words, labels, context = (select_true(tensor, selected) for tensor in (words, labels, context))
        output_arguments = {name: select_true(tensor, selected) for name, tensor in output_arguments.items()}
    has_context = (context.sum(-1) > 0).to(dtype)
    averages = context / context.sum(-1, keepdim=True).clamp(min=1) if average else None
    weights = torch.diag_embed(has_context) if average else context.transpose(1, 2)  # of each predictor's targets
    if not output_arguments:
        return Blocks(words, averages, labels.clamp(min=0), None, weights)
    if "paths" in output_arguments:
        paths = output_arguments["paths"]
        columns, targets = paths.clamp(min=0).flatten(1), (output_arguments["codes"] == 0).to(dtype).flatten(1)
        weights = (weights[..., None] * (paths >= 0).to(dtype)[:, None]).flatten(2)
    else:
        negatives = output_arguments["negatives"]
        columns = torch.cat([labels.clamp(min=0), negatives], 1)
        targets = (torch.arange(columns.shape[1], device=columns.device) < size).to(dtype).expand(len(columns), -1)
        negative_weights = (labels[:, :, None] != negatives[:, None]).to(dtype) * (number / negatives.shape[1])
        negative_weights = negative_weights * has_context[:, :, None] if average else weights @ negative_weights
        weights = torch.cat([weights, negative_weights], 2)
    return Blocks(words, averages, columns, targets[:, None], weights)


def summed_loss(blocks: Blocks, words: Tensor, outputs: Tensor) -> Tensor:
    """Weighted cross-entropy in nats summed over all cells; differentiable.

    Each word of a mean gets the whole gradient of the mean, not divided by the number of words, as in the released
    code. `words` and `outputs` are the (vocabulary, dim) and (outputs, dim) tables.
    """
    vectors = F.embedding(blocks.words, words)
    predictors = blocks.predictors(vectors)
    if blocks.averages is not None:
        sums = torch.bmm((blocks.averages != 0).to(vectors.dtype), vectors)
        predictors = sums + (predictors - sums).detach()
    if blocks.targets is None:
        return _summed_softmax_loss(blocks, predictors, outputs)
    scores = torch.bmm(predictors, F.embedding(blocks.columns, outputs).transpose(1, 2)).float()
    losses = F.binary_cross_entropy_with_logits(scores, blocks.targets.expand_as(scores).float(), reduction="none")
    return (losses * blocks.weights).sum()


def _summed_softmax_loss(blocks: Blocks, predictors: Tensor, outputs: Tensor) -> Tensor:
    """Cross-entropy of the full softmax in nats, summed over the pairs of (blocks, predictors, dim) and labels.

    The logarithm of a predictor's normalizer, needed once for all of its labels, is its cross-entropy with output 0
    plus the score of that output.
    """
    num_labels = blocks.weights.sum(-1)
    has_labels = num_labels > 0
    states, num_labels = predictors[has_labels], num_labels[has_labels]
    targets = torch.zeros(len(states), dtype=torch.long, device=states.device)
    normalizers = chunked_cross_entropy(states, outputs, None, targets, num_labels.float())
    normalizers = normalizers + torch.dot(states @ outputs[0], num_labels.to(states.dtype))
    scores = torch.bmm(predictors, F.embedding(blocks.columns, outputs).transpose(1, 2))
    return normalizers - (scores * blocks.weights).sum().float()


@torch.no_grad()
def sgd_step(blocks: Blocks, words: Tensor, outputs: Tensor, rate: float) -> Tensor:
    """One SGD step on `summed_loss`, in place on both tables; returns the loss before it."""
    if blocks.targets is None:  # the gradient of the softmax is dense
        with torch.enable_grad():
            tables = [table.detach().requires_grad_() for table in (words, outputs)]
            loss = summed_loss(blocks, *tables)
            gradients = torch.autograd.grad(loss, tables)
        for table, gradient in zip((words, outputs), gradients, strict=True):
            table.sub_(gradient, alpha=rate)
        return loss.detach()
    vectors = F.embedding(blocks.words, words)
    predictors = blocks.predictors(vectors)
    columns = F.embedding(blocks.columns, outputs)
    signs, weights = 2 * blocks.targets.float() - 1, blocks.weights.float()
    error_probabilities = torch.bmm(predictors, columns.transpose(1, 2)).float().mul_(-signs).sigmoid_()
    loss = -torch.dot(torch.log1p(-error_probabilities.clamp(max=_MAX_BELOW_ONE)).flatten(), weights.flatten())
    errors = error_probabilities.mul_(weights).mul_(signs * rate).to(columns.dtype)
    word_updates = torch.bmm(errors, columns)
    output_updates = torch.bmm(errors.transpose(1, 2), predictors)
    if blocks.averages is not None:
        word_updates = torch.bmm((blocks.averages != 0).to(word_updates.dtype).transpose(1, 2), word_updates)
    words.index_add_(0, blocks.words.flatten(), word_updates.flatten(0, 1).to(words.dtype))
    outputs.index_add_(0, blocks.columns.flatten(), output_updates.flatten(0, 1).to(outputs.dtype))
    return loss


def sgd_step_by_words(
    text: TextBatch, words: Tensor, outputs: Tensor, rate: float, number: float, average: bool
) -> float:
    """Compute `sgd_step` word by word, compiled, on float32 tables on the CPU.

    Returns the summed loss, where each word's loss precedes its update. Other arguments as in `build_blocks`.
    """
    kernels = importlib.import_module("hf_ctxmodels.models.word2vec.sgd_kernel")  # numba takes a second to import
    no_negatives, no_paths = torch.zeros(0, 1, 1, dtype=torch.long), torch.zeros(0, 1, 1, 1, dtype=torch.long)
    negatives = text.output_arguments.get("negatives", no_negatives)
    paths, codes = text.output_arguments.get("paths", no_paths), text.output_arguments.get("codes", no_paths)
    arrays = (text.ids, text.is_token, text.labels, text.windows, negatives, paths, codes)
    return kernels.word2vec_sgd_kernel(
        words.numpy(),
        outputs.numpy(),
        *map(np.ascontiguousarray, arrays),
        text.block_size,
        np.float32(number / negatives.shape[2]),
        np.float32(rate),
        average,
    )
