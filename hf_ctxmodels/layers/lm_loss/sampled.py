"""Cross-entropy against a sample of the vocabulary (Jean et al. 2015, arXiv 1412.2007)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def log_uniform(ids: Tensor, vocab_size: int) -> Tensor:
    """Probability of each id: `log((id + 2) / (id + 1)) / log(vocabulary + 1)`, double precision.

    Close to how often words occur where ids are in the order of their frequency.
    """
    return (1 / (ids.double() + 1)).log1p() / math.log(vocab_size + 1)


def sampled_cross_entropy(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """Summed cross-entropy of the targets among themselves and the negatives, in nats.

    A word that was drawn several times counts once, and from every logit goes the logarithm of the chance that its word
    was drawn at all; so the loss is, for very many negatives, that of the whole softmax. A negative that is a row's
    target does not count there.

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), (vocabulary,).
        targets: (rows,) ids.
        negatives: (k,) ids drawn with the probabilities of `log_uniform`, the same for all rows.
    """
    vocab_size, tries = len(weight), len(negatives)

    def correction(ids: Tensor) -> Tensor:
        return (-torch.expm1(tries * torch.log1p(-log_uniform(ids, vocab_size)))).log().float()

    negatives = negatives.unique()
    true = (hidden_states * weight[targets]).sum(-1) + bias[targets]
    true = true.float() - correction(targets)
    others = F.linear(hidden_states, weight[negatives], bias[negatives]).float() - correction(negatives)
    others = others.masked_fill(targets[:, None] == negatives, float("-inf"))
    return (torch.cat([true[:, None], others], 1).logsumexp(1) - true).sum()
