"""Sampled softmax (Jean et al. 2015, arXiv 1412.2007)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def log_uniform_probability(ids: Tensor, vocab_size: int) -> Tensor:
    """Probability of each id, `log((id + 2) / (id + 1)) / log(vocabulary + 1)`, in double precision: close to word
    frequencies for ids in the order of frequency."""
    return (1 / (ids.double() + 1)).log1p() / math.log(vocab_size + 1)


def sampled_softmax_loss(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """Summed cross-entropy in nats of each target against the negatives.

    Repeated negatives count once, and each logit is corrected by the log probability that its word was sampled at all;
    with many negatives the loss approaches that of the full softmax. A negative equal to a row's target is excluded
    there.

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), (vocabulary,).
        targets: (rows,) ids.
        negatives: (k,) samples of `log_uniform_probability`, the same for all rows.
    """
    vocab_size, tries = len(weight), len(negatives)

    def correction(ids: Tensor) -> Tensor:
        return (-torch.expm1(tries * torch.log1p(-log_uniform_probability(ids, vocab_size)))).log().float()

    negatives = negatives.unique()
    true = (hidden_states * weight[targets]).sum(-1) + bias[targets]
    true = true.float() - correction(targets)
    others = F.linear(hidden_states, weight[negatives], bias[negatives]).float() - correction(negatives)
    others = others.masked_fill(targets[:, None] == negatives, float("-inf"))
    return (torch.cat([true[:, None], others], 1).logsumexp(1) - true).sum()
