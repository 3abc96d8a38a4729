"""Cross-entropy against a sample of the vocabulary (Jean et al. 2015, arXiv 1412.2007)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def log_uniform_logs(ids: Tensor, vocab_size: int) -> Tensor:
    """Logarithm of the probability of each id under `log((id + 2) / (id + 1)) / log(vocabulary + 1)`.

    Close to how often words occur where ids are in the order of their frequency.
    """
    ids = ids.double()
    return (((ids + 2) / (ids + 1)).log() / math.log(vocab_size + 1)).log().float()


def log_uniform_samples(numbers: Tensor, vocab_size: int) -> Tensor:
    """Ids with the probabilities of `log_uniform_logs`, from numbers that are uniform in [0, 1)."""
    ids = (numbers.double() * math.log(vocab_size + 1)).exp().long() - 1
    return ids.clamp(0, vocab_size - 1)


def sampled_cross_entropy(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """Summed cross-entropy of the targets among themselves and the negatives, in nats.

    From every logit goes the logarithm of how often its word is expected among the negatives, so that the gradient is,
    for many negatives, that of the whole softmax. A negative that is a row's target does not count there.

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), (vocabulary,).
        targets: (rows,) ids.
        negatives: (k,) ids drawn by `log_uniform_samples`, the same for all rows.
    """
    vocab_size, drawn = len(weight), math.log(len(negatives))
    true = (hidden_states * weight[targets]).sum(-1) + bias[targets]
    true = true.float() - log_uniform_logs(targets, vocab_size) - drawn
    others = F.linear(hidden_states, weight[negatives], bias[negatives]).float()
    others = others - log_uniform_logs(negatives, vocab_size) - drawn
    others = others.masked_fill(targets[:, None] == negatives, float("-inf"))
    return (torch.cat([true[:, None], others], 1).logsumexp(1) - true).sum()
