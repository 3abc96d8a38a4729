"""Divergence of the relations between the tokens of a sequence (Wang et al. 2020, arXiv 2002.10957, section 3)."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_ctxmodels.core.devices import without_autocast
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunk_size

VectorPair = tuple[Tensor, Tensor]
"""(batch, length, width) vectors A and B of the tokens, such as queries and keys; both may be the same."""


def relation_divergence(student: VectorPair, teacher: VectorPair, num_heads: int, pair_mask: Tensor) -> Tensor:
    """Sum over tokens of KL(teacher || student) in nats of the relations softmax(AB^T / sqrt(d)), averaged over heads.

    The vectors are split into heads of width d, so that the widths of student and teacher may differ. The relations of
    only some heads and sequences are in memory at a time: the backward pass computes them again.

    Args:
        pair_mask: (batch, length, length) bool: pairs of tokens of one sequence; rows of padding are False.
    """
    vectors = [
        tensor.float().unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(0, 1) for tensor in (*student, *teacher)
    ]
    sequences = torch.arange(len(pair_mask), device=pair_mask.device).repeat_interleave(num_heads)
    # the divergence needs several tensors of this size; chunks of 2^23 relations took 3 times as long on a CPU
    size = chunk_size(len(sequences), 4 * pair_mask.shape[1] ** 2, pair_mask.device)
    chunks = zip(*(tensor.split(size) for tensor in (*vectors, sequences)), strict=True)
    divergences = [
        checkpoint(_divergence, *chunk, pair_mask, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    ]
    return torch.stack(divergences).sum() / num_heads


def _divergence(
    student_a: Tensor, student_b: Tensor, teacher_a: Tensor, teacher_b: Tensor, sequences: Tensor, pair_mask: Tensor
) -> Tensor:
    """The sum over tokens and heads, from (heads, length, d) vectors and the (heads,) indices of their sequences."""
    is_excluded = ~pair_mask[sequences]
    with without_autocast(pair_mask.device.type):
        log_relations, targets = (
            _log_relations(*vectors, is_excluded) for vectors in ((student_a, student_b), (teacher_a, teacher_b))
        )
        divergences = F.kl_div(log_relations, targets, reduction="none", log_target=True)
        return divergences.masked_fill(is_excluded, 0.0).sum()


def _log_relations(a: Tensor, b: Tensor, is_excluded: Tensor) -> Tensor:
    """(heads, length, length) log-probabilities; finite, but arbitrary for excluded pairs."""
    scores = (a * a.shape[-1] ** -0.5) @ b.transpose(1, 2)
    return scores.masked_fill(is_excluded, torch.finfo(scores.dtype).min).log_softmax(-1)
