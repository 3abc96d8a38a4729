"""Replaced token detection: the generator's samples and the discriminator's losses (Clark et al. 2020, section 2).

`fill_masked` computes the generator's loss and samples, with the vocabulary layer at the masked positions only. No
gradient flows through the samples (section 2, "we don't back-propagate").
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.layers.lm_loss.cross_entropy import CHUNK_ELEMENTS, MaskedLMHead, ProjectedHead
from hf_ctxmodels.layers.lm_loss.sampling import uniforms


class FilledBatch(NamedTuple):
    """A masked batch after the generator.

    Attributes:
        input_ids: (batch, length) the batch with a sample at every masked position.
        loss: The generator's summed cross-entropy in nats.
        correct: Number of masked tokens with the generator's largest logit.
    """

    input_ids: Tensor
    loss: Tensor
    correct: Tensor


def fill_masked(
    states: Tensor, head: MaskedLMHead, input_ids: Tensor, labels: Tensor, seeds: Tensor | None = None
) -> FilledBatch:
    """Fill masked positions with samples of the generator's distribution.

    Args:
        states: (targets, hidden) the generator's output where `labels` is not -100, in row-major order.
        head: The generator's head.
        input_ids: (batch, length) with masks.
        labels: (batch, length) original ids at masked positions, -100 elsewhere.
        seeds: (batch,) int64: a row's samples depend on its seed, not on other rows or padding. None derives the seeds
            from the rows' masked tokens.
    """
    masked = labels != IGNORE_INDEX
    numbering = masked.cumsum(1) - 1  # of the row's masked tokens, independent of padding
    if seeds is None:
        seeds = _derive_seeds(input_ids, labels, numbering)
    numbers = uniforms(seeds[:, None].expand_as(numbering)[masked], numbering[masked])
    loss, samples, correct = head.summed_loss_and_samples(states, labels[masked], numbers)
    return FilledBatch(input_ids.long().masked_scatter(masked, samples), loss, correct)


def _derive_seeds(input_ids: Tensor, labels: Tensor, numbering: Tensor) -> Tensor:
    """(batch,) a hash of each row's masked tokens and their replacements."""
    masked = labels != IGNORE_INDEX
    words = (uniforms(labels * (1 << 32) + input_ids, numbering) * 2**24).long()
    return (words * masked).sum(1)


class DetectionHead(ProjectedHead):
    """Two layers to one logit per token: whether it was replaced (section 2, D(x, t)).

    Args:
        hidden_size: Width of the discriminator.
        activation: Activation between the layers.
    """

    def __init__(self, hidden_size: int, *, activation: str) -> None:
        super().__init__(hidden_size, 1, activation=activation)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (...) logits; positive for replaced tokens."""
        return super().forward(hidden_states).squeeze(-1)


def detection_loss(logits: Tensor, replaced: Tensor) -> Tensor:
    """Summed binary cross-entropy in nats.

    Args:
        logits: (tokens,).
        replaced: (tokens,) bool. A sample equal to the original token counts as original.
    """
    return F.binary_cross_entropy_with_logits(logits.float(), replaced.float(), reduction="sum")


def detection_counts(logits: Tensor, replaced: Tensor) -> dict[str, Tensor]:
    """Precision, recall and F1 of "replaced" at a threshold of one half, and the share of replaced tokens, each as
    (numerator, denominator).

    Args:
        logits, replaced: As in `detection_loss`.
    """
    flagged = logits > 0
    hits, predicted, positives = (flagged & replaced).sum(), flagged.sum(), replaced.sum()
    ratios = {"precision": (hits, predicted), "recall": (hits, positives), "f1": (2 * hits, predicted + positives)}
    ratios["share"] = (positives, torch.full_like(positives, replaced.numel()))
    return {name: torch.stack(ratio).float() for name, ratio in ratios.items()}


def copy_or_predict_loss(
    head: MaskedLMHead,
    gate_logits: Tensor,
    states: Tensor,
    corrupted_ids: Tensor,
    original_ids: Tensor,
) -> Tensor:
    """Summed cross-entropy in nats of the original tokens with a copy mechanism (section 3.5, "All-Tokens MLM").

    The probability is D for copying the input token, and 1 - D times the head's distribution over the vocabulary.

    Args:
        head: The head over the vocabulary.
        gate_logits: (tokens,) D before the sigmoid.
        states: (tokens, hidden).
        corrupted_ids, original_ids: (tokens,).
    """
    rows = max(1, CHUNK_ELEMENTS // head.decoder.out_features)
    chunks = max(1, math.ceil(len(states) / rows))
    parts = zip(*(tensor.chunk(chunks) for tensor in (gate_logits, states, corrupted_ids, original_ids)), strict=True)
    # the backward pass recomputes the logits chunk by chunk
    return torch.stack([checkpoint(_copy_or_predict, head, *part, use_reentrant=False) for part in parts]).sum()


def _copy_or_predict(
    head: Callable[[Tensor], Tensor], gate_logits: Tensor, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
) -> Tensor:
    gate_logits = gate_logits.float()
    predicted = F.logsigmoid(-gate_logits) - F.cross_entropy(head(states).float(), original_ids, reduction="none")
    copied = F.logsigmoid(gate_logits).masked_fill(corrupted_ids != original_ids, float("-inf"))
    return -torch.logaddexp(predicted, copied).sum()
