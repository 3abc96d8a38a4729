"""Replaced token detection: the generator's samples and the discriminator's losses (Clark et al. 2020, section 2)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.host_copies import true_indices
from hf_ctxmodels.heads.base import mask_of_targets
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead, ProjectedHead, chunk_size
from hf_ctxmodels.layers.lm_loss.sampling import uniforms


class FilledBatch(NamedTuple):
    """A masked batch, filled by the generator."""

    input_ids: Tensor  # (batch, length) with samples at the masked positions
    loss: Tensor  # summed cross-entropy of the generator in nats
    correct: Tensor  # number of masked tokens that the generator predicts correctly (argmax)


def fill_masked(
    states: Tensor, head: MaskedLMHead, input_ids: Tensor, labels: Tensor, seeds: Tensor | None = None
) -> FilledBatch:
    """Fill masked positions with samples from the generator's distribution, without gradient (section 2, "we don't
    back-propagate"). The output layer is computed at these positions only.

    Args:
        states: (targets, hidden) output of the generator where `labels` (batch, length) is not -100.
        seeds: (batch,) int64. The samples of an example depend on its seed, but not on other examples or padding. None
            derives the seeds from the masked tokens.
    """
    masked = mask_of_targets(labels)
    mask_numbers = masked.cumsum(1) - 1  # number of the masked token in its example, independent of padding
    if seeds is None:
        seeds = _derive_seeds(input_ids, labels, mask_numbers)
    indices = true_indices(masked)
    random_numbers = uniforms(seeds[indices // labels.shape[1]], mask_numbers.flatten()[indices])
    loss, samples, correct = head.summed_loss_and_samples(states, labels.flatten()[indices], random_numbers)
    filled_ids = input_ids.long().flatten().index_copy(0, indices, samples).view_as(input_ids)
    return FilledBatch(filled_ids, loss, correct)


def _derive_seeds(input_ids: Tensor, labels: Tensor, mask_numbers: Tensor) -> Tensor:
    """(batch,) hash of the masked tokens of each example and the tokens in their place."""
    masked = labels != IGNORE_INDEX
    hashes = (uniforms(labels * (1 << 32) + input_ids, mask_numbers) * 2**24).long()
    return (hashes * masked).sum(1)


class DetectionHead(ProjectedHead):
    """Binary classifier of tokens as original or replaced: two linear layers (section 2, D(x, t))."""

    def __init__(self, hidden_size: int, *, activation: str) -> None:
        super().__init__(hidden_size, 1, activation=activation)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (...) logits, positive for replaced tokens."""
        return super().forward(hidden_states).squeeze(-1)


def detection_loss(logits: Tensor, replaced: Tensor) -> Tensor:
    """Summed binary cross-entropy in nats of (tokens,) logits; a sample equal to the original token is not replaced."""
    return F.binary_cross_entropy_with_logits(logits.float(), replaced.float(), reduction="sum")


def detection_counts(logits: Tensor, replaced: Tensor) -> dict[str, Tensor]:
    """Precision, recall and F1 of replaced tokens at threshold 0.5, and their share, as (numerator, denominator)."""
    predicted = logits > 0
    hits, positives = (predicted & replaced).sum(), replaced.sum()
    ratios = {
        "precision": (hits, predicted.sum()),
        "recall": (hits, positives),
        "f1": (2 * hits, predicted.sum() + positives),
        "share": (positives, torch.full_like(positives, replaced.numel())),
    }
    return {name: torch.stack(ratio).float() for name, ratio in ratios.items()}


def copy_or_predict_loss(
    head: MaskedLMHead, gate_logits: Tensor, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
) -> Tensor:
    """Summed cross-entropy in nats of the original tokens with a copy mechanism (section 3.5, "All-Tokens MLM").

    With probability D the input token is copied, otherwise a token is predicted by the head; `gate_logits` (tokens,) is
    D before the sigmoid.
    """
    size = chunk_size(len(states), head.decoder.out_features, states.device)
    num_chunks = max(1, math.ceil(len(states) / size))
    tensors = (gate_logits, states, corrupted_ids, original_ids)
    chunks = zip(*(tensor.chunk(num_chunks) for tensor in tensors), strict=True)
    # the backward pass recomputes the logits per chunk
    return torch.stack([checkpoint(_copy_or_predict, head, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def _copy_or_predict(
    head: Callable[[Tensor], Tensor], gate_logits: Tensor, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
) -> Tensor:
    gate_logits = gate_logits.float()
    predicted = F.logsigmoid(-gate_logits) - F.cross_entropy(head(states).float(), original_ids, reduction="none")
    copied = F.logsigmoid(gate_logits).masked_fill(corrupted_ids != original_ids, float("-inf"))
    return -torch.logaddexp(predicted, copied).sum()
