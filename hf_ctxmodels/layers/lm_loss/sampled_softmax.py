"""Sampled softmax (Jean et al. 2015, arXiv 1412.2007)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def log_uniform_probability(ids: Tensor, vocab_size: int) -> Tensor:
    """Probability of each id, `log((id + 2) / (id + 1)) / log(vocabulary + 1)`, in float64: close to word frequencies
    for ids in the order of frequency."""
    return (1 / (ids.double() + 1)).log1p() / math.log(vocab_size + 1)


def sampled_softmax_loss(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """Summed cross-entropy in nats of each target against the negatives.

    Repeated negatives count once, and each logit is corrected by the log probability that its word is among the
    samples; with many negatives the loss approaches the full softmax. A negative equal to a row's target is excluded
    in this row.

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), (vocabulary,).
        targets: (rows,) ids.
        negatives: (k,) samples of `log_uniform_probability`, the same for all rows.
    """
    vocab_size, num_samples = len(weight), len(negatives)

    def log_inclusion_probability(ids: Tensor) -> Tensor:
        log_exclusion = num_samples * torch.log1p(-log_uniform_probability(ids, vocab_size))
        return (-torch.expm1(log_exclusion)).log().float()

    negatives = negatives.unique()
    target_logits = ((hidden_states * weight[targets]).sum(-1) + bias[targets]).float()
    target_logits = target_logits - log_inclusion_probability(targets)
    negative_logits = F.linear(hidden_states, weight[negatives], bias[negatives]).float()
    negative_logits = negative_logits - log_inclusion_probability(negatives)
    negative_logits = negative_logits.masked_fill(targets[:, None] == negatives, float("-inf"))
    return (torch.cat([target_logits[:, None], negative_logits], 1).logsumexp(1) - target_logits).sum()
