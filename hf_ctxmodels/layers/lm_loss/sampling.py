"""Sampling with counter-based random numbers, independent of a generator's state; sampled softmax."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.host_copies import on_host

_BLOCK = 256  # columns of a partial sum
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1), multiples of 2^-24, as a function of (...) int64 seeds and indices from 0:
    outputs of SplitMix64 (Steele, Lea & Flood 2014)."""
    state = _scramble(seeds) + (indices + 1) * _STEP  # scrambled first, since consecutive seeds are common
    return (_logical_shift(_scramble(state), 40)).float() * 2.0**-24


def _scramble(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _FIRST
    state = (state ^ _logical_shift(state, 27)) * _SECOND
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right with zeros (torch extends the sign)."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def sample_categorical(probabilities: Tensor, uniform_numbers: Tensor) -> Tensor:
    """One sample per row by inversion: the first column at which the cumulative sum exceeds the row's uniform number.

    The sum is over blocks of columns first, then over the columns of one block: one pass with little rounding.

    Probabilities are (rows, columns) float32 with a positive sum, `uniform_numbers` (rows,) in [0, 1); returns (rows,)
    int64 columns, none of probability 0.
    """
    columns = probabilities.shape[1]
    full = columns - columns % _BLOCK
    block_sums = probabilities[:, :full].unflatten(1, (-1, _BLOCK)).sum(-1)
    if full < columns:
        block_sums = torch.cat([block_sums, probabilities[:, full:].sum(1, keepdim=True)], 1)
    cumulative = block_sums.cumsum(1)
    level = uniform_numbers[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, level)
    level = (level - (cumulative - block_sums).gather(1, block)).clamp(min=0)
    candidates = block * _BLOCK + torch.arange(min(_BLOCK, columns), device=probabilities.device)
    candidate_probabilities = probabilities.gather(1, candidates.clamp(max=columns - 1))
    candidate_probabilities = candidate_probabilities.masked_fill(candidates >= columns, 0)
    return candidates.gather(1, _first_above(candidate_probabilities.cumsum(1), level)).squeeze(1)


def _first_above(cumulative: Tensor, level: Tensor) -> Tensor:
    """(rows, 1): the first column at which the cumulative sums exceed the level, despite rounding never past the
    last."""
    maximum = cumulative[:, -1:] * (1 - 2 * torch.finfo(cumulative.dtype).eps)
    return (cumulative <= torch.minimum(level, maximum)).sum(1, keepdim=True)


def log_uniform_probability(ids: Tensor, vocab_size: int) -> Tensor:
    """Probability of each id, `log((id + 2) / (id + 1)) / log(vocabulary + 1)`, in float32: close to word frequencies
    for ids in the order of frequency."""
    return (1 / (ids.float() + 1)).log1p() / math.log(vocab_size + 1)


def sampled_softmax_loss(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """Summed cross-entropy in nats of each target against the negatives, except negatives equal to the target.

    Repeated negatives count once, and each logit is corrected by the log probability that its word is among the
    samples; with many negatives the loss approaches the full softmax.

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), (vocabulary,).
        targets: (rows,) ids.
        negatives: (...) samples of `log_uniform_probability`, the same for all rows.
    """
    vocab_size, num_samples = len(weight), negatives.numel()

    def log_inclusion_probability(ids: Tensor) -> Tensor:
        log_exclusion = num_samples * torch.log1p(-log_uniform_probability(ids, vocab_size))
        return (-torch.expm1(log_exclusion)).log()

    negatives = on_host(torch.unique, negatives)
    target_logits = ((hidden_states * weight[targets]).sum(-1) + bias[targets]).float()
    target_logits = target_logits - log_inclusion_probability(targets)
    negative_logits = F.linear(hidden_states, weight[negatives], bias[negatives]).float()
    negative_logits = negative_logits - log_inclusion_probability(negatives)
    negative_logits = negative_logits.masked_fill(targets[:, None] == negatives, float("-inf"))
    return (torch.cat([target_logits[:, None], negative_logits], 1).logsumexp(1) - target_logits).sum()
