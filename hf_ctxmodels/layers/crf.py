"""Linear-chain conditional random fields (Lafferty et al. 2001; on neural scores: Lample et al. 2016, arXiv 1603.01360,
section 2.2), and the constraints of BIO labels.

The score of the labels y of a sentence with the emissions P is

    s(y) = start[y_1] + sum_t P[t, y_t] + sum_t transition[y_(t-1), y_t] + end[y_n].

Emissions are (batch, words, labels). Masks `is_word` are (batch, words) bool; positions outside the mask, anywhere in a
row, do not belong to the sentence. Loops run over words, with all sentences and labels in one operation, in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.host_copies import is_traced

FORBIDDEN = -1e30
"""Score of forbidden labels and transitions: its exponential is exactly 0, and sums and gradients remain finite, unlike
with -inf."""


class Constraints(NamedTuple):
    """Forbidden sequences of labels.

    Attributes:
        transitions: (labels, labels) bool, True if the second label must not follow the first.
        starts: (labels,) bool, True if a sentence must not start with the label.
    """

    transitions: np.ndarray
    starts: np.ndarray

    @classmethod
    def bio(cls, labels: Sequence[str]) -> "Constraints":
        """The constraints of BIO labels (IOB2): `I-X` follows `B-X` or `I-X` only. Other labels are unconstrained, and
        an `I-X` without a `B-X` among the labels as well."""
        needs_start = np.array([label.startswith("I-") and f"B-{label[2:]}" in labels for label in labels])
        continues = np.array([[label[2:] == previous[2:] and previous[:2] in ("B-", "I-") for label in labels]
                              for previous in labels])  # fmt: skip
        return cls(needs_start & ~continues, needs_start)

    def scores(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`FORBIDDEN` for forbidden transitions and starts, else 0."""
        transitions, starts = (torch.from_numpy(forbidden).to(device).float() * FORBIDDEN for forbidden in self)
        return transitions, starts


class Scores(NamedTuple):
    """Scores of transitions (labels, labels), or (batch, labels, labels), of first labels (labels,) or (batch, labels)
    and of last labels (labels,)."""

    transitions: Tensor
    starts: Tensor
    ends: Tensor


class ConditionalRandomField(nn.Module):
    """Scores of transitions, first and last labels.

    Initially all are 0, so the labels of a sentence are independent, apart from the constraints.

    Args:
        constraints: Sequences of labels with probability 0; None for no constraints.
    """

    initializes_itself = True

    def __init__(self, num_labels: int, constraints: Constraints | None = None) -> None:
        super().__init__()
        self.constraints = constraints
        self.transitions = nn.Parameter(torch.zeros(num_labels, num_labels))
        self.starts = nn.Parameter(torch.zeros(num_labels))
        self.ends = nn.Parameter(torch.zeros(num_labels))

    def reset_parameters(self) -> None:
        """Set all scores to 0."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    def scores(self) -> Scores:
        """The scores in float32, including the constraints."""
        transitions, starts = self.transitions.float(), self.starts.float()
        if self.constraints is not None:
            forbidden_transitions, forbidden_starts = self.constraints.scores(starts.device)
            transitions, starts = transitions + forbidden_transitions, starts + forbidden_starts
        return Scores(transitions, starts, self.ends.float())

    def log_likelihood(self, emissions: Tensor, is_word: Tensor, labels: Tensor) -> Tensor:
        """(batch,) exact log-likelihood of the labels by the forward algorithm (Lample et al. 2016, equation 1).

        Args:
            labels: (batch, words). A word with the label -100 has no target: the likelihood is the sum over its labels
                (Tsuboi et al. 2008). Labels that violate the constraints, such as I- at the start of the second part
                of a divided sentence, are scored without constraints.
        """
        emissions, is_word, labels = _left_aligned(is_word, emissions.float(), labels)
        has_label = is_word & (labels != IGNORE_INDEX)
        ids = labels.masked_fill(~has_label, 0)
        scores = Scores(self.transitions.float(), self.starts.float(), self.ends.float())
        normalizer = self._constrained_scores(scores, ids, has_label)
        log_normalizer = _log_partition(emissions, is_word, normalizer)
        if is_traced(labels) or bool((has_label != is_word).any()):
            other_labels = torch.arange(emissions.shape[2], device=ids.device) != ids[..., None]
            emissions = emissions.masked_fill(has_label[..., None] & other_labels, FORBIDDEN)
            return _log_partition(emissions, is_word, normalizer) - log_normalizer
        return _score(emissions, is_word, ids, scores) - log_normalizer

    def _constrained_scores(self, scores: Scores, ids: Tensor, has_label: Tensor) -> Scores:
        """The scores with the constraints of each sentence, (batch, ...), unless its labels violate them."""
        if self.constraints is None:
            return scores
        transitions, starts = self.constraints.scores(ids.device)
        pairs = has_label[:, 1:] & has_label[:, :-1]
        violations = (transitions[ids[:, :-1], ids[:, 1:]] < 0) & pairs
        is_valid = ~violations.any(1) & ~((starts[ids[:, 0]] < 0) & has_label[:, 0])
        return Scores(
            scores.transitions + transitions * is_valid[:, None, None],
            scores.starts + starts * is_valid[:, None],
            scores.ends,
        )


def viterbi(emissions: Tensor, is_word: Tensor, scores: Scores) -> Tensor:
    """(batch, words) labels of the sentences with the highest score, -100 outside the mask (Viterbi 1967)."""
    aligned, mask, _ = _left_aligned(is_word, emissions.float(), is_word.long())
    return _unaligned(is_word, _best_labels(aligned, mask, scores, _best_continuations(aligned, mask, scores)))


def max_marginals(emissions: Tensor, is_word: Tensor, scores: Scores) -> Tensor:
    """(batch, words, labels) difference between the score of the best labels of the sentence with this label at this
    word, and the score of the best labels; 0 outside the mask.

    It is 0 for the labels of `viterbi` and negative for all others, so that `argmax` is Viterbi decoding.
    """
    aligned, mask, _ = _left_aligned(is_word, emissions.float(), is_word.long())
    continuations = _best_continuations(aligned, mask, scores)
    labels = _best_labels(aligned, mask, scores, continuations)
    states = [scores.starts + aligned[:, 0]]
    for word in range(1, aligned.shape[1]):
        states.append((states[-1][:, :, None] + scores.transitions).amax(1) + aligned[:, word])
    totals = torch.stack(states, 1) + torch.stack(continuations, 1)
    # rounding, and paths of equal scores, must not make another label the largest
    margins = (totals - totals.amax(-1, keepdim=True)).clamp(max=-torch.finfo(torch.float32).tiny)
    margins = margins.scatter(2, labels.clamp(min=0)[..., None], 0.0)
    return _unaligned(is_word, margins * mask[..., None])


def _left_aligned(is_word: Tensor, emissions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Emissions, mask and labels with the words of each sentence first."""
    order = (~is_word).long().argsort(dim=1, stable=True)
    aligned = emissions.gather(1, order[..., None].expand_as(emissions))
    return aligned, is_word.gather(1, order), labels.gather(1, order)


def _unaligned(is_word: Tensor, values: Tensor) -> Tensor:
    """(batch, words, ...) values of left-aligned words at their positions."""
    order = (~is_word).long().argsort(dim=1, stable=True)
    return values.scatter(1, order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values), values)


def _score(emissions: Tensor, is_word: Tensor, ids: Tensor, scores: Scores) -> Tensor:
    """(batch,) score of the labels `ids` of left-aligned sentences; 0 without words."""
    emission_scores = emissions.gather(2, ids[..., None])[..., 0] * is_word
    transition_scores = scores.transitions[ids[:, :-1], ids[:, 1:]] * is_word[:, 1:]
    last = ids.gather(1, (is_word.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
    edges = (scores.starts[ids[:, 0]] + scores.ends[last]) * is_word[:, 0]
    return emission_scores.sum(1) + transition_scores.sum(1) + edges


def _log_partition(emissions: Tensor, is_word: Tensor, scores: Scores) -> Tensor:
    """(batch,) logarithm of the sum of exp(score) over all labels of left-aligned sentences; 0 without words."""
    states = scores.starts + emissions[:, 0]
    for word in range(1, emissions.shape[1]):
        updated = torch.logsumexp(states[:, :, None] + scores.transitions, 1) + emissions[:, word]
        states = torch.where(is_word[:, word, None], updated, states)
    return torch.logsumexp(states + scores.ends, 1) * is_word[:, 0]


def _best_continuations(emissions: Tensor, is_word: Tensor, scores: Scores) -> list[Tensor]:
    """For each word of left-aligned sentences, (batch, labels) score of the best labels of the words after it."""
    ends = scores.ends.expand_as(emissions[:, 0])
    continuations = [ends]
    for word in range(emissions.shape[1] - 1, 0, -1):
        following = (continuations[-1] + emissions[:, word])[:, None]
        continuations.append(torch.where(is_word[:, word, None], (scores.transitions + following).amax(2), ends))
    return continuations[::-1]


def _best_labels(emissions: Tensor, is_word: Tensor, scores: Scores, continuations: Sequence[Tensor]) -> Tensor:
    """(batch, words) best labels of left-aligned sentences, -100 after the last word."""
    labels = [(scores.starts + emissions[:, 0] + continuations[0]).argmax(1)]
    for word in range(1, emissions.shape[1]):
        totals = scores.transitions[labels[-1]] + emissions[:, word] + continuations[word]
        labels.append(totals.argmax(1))
    return torch.stack(labels, 1).masked_fill(~is_word, IGNORE_INDEX)
