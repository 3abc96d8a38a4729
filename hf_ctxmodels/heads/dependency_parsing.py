"""Loss and output of the heads for dependency parsing: the incoming edge of each word is a class.

The scores of the edges are (batch, words, 1 + words, relations), see `layers.biaffine.BiaffineScorer`; the probability
of an edge is normalized over all heads and relations of a word (Clark et al. 2018, arXiv 1809.08370, section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_ctxmodels.core.constants import IGNORE_INDEX, ROOT_HEAD
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy
from hf_ctxmodels.heads.base import ItemCounts, check_classes, cross_entropy_over_targets, validate_targets


@dataclass
class DependencyParsingOutput(ModelOutput):
    """Scores of the edges between the words of sentences; words and heads include padding and special tokens.

    Attributes:
        loss: Cross-entropy of the edges, in nats per word.
        logits: (batch, words, 1 + words, relations) scores of the root, and of the word in each column as head.
        arc_scores: (batch, words, 1 + words) log-probability of the best relation to each head; only in evaluation.
        arc_relations: (batch, words, 1 + words) index of this relation; only in evaluation.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    arc_scores: Tensor | None = None
    arc_relations: Tensor | None = None


def edge_labels(labels: Tensor, heads: Tensor | None, num_relations: int) -> Tensor:
    """The class of each word's edge in the flattened last two axes of the scores; -100 at words without target.

    Args:
        labels: (batch, words) relations; -100 is ignored.
        heads: (batch, words) columns of the heads, -1 for the root; ignored at words without target.

    Raises:
        CtxError: `heads` is missing, or a relation or a head is out of range.
    """
    labels = validate_targets(labels, "labels")
    if heads is None:
        if bool((host_copy(labels) != IGNORE_INDEX).any()):
            raise CtxError("The relations in labels have no heads.", hint="pass heads, (batch, words).")
        return labels
    heads = validate_targets(heads, "heads", labels.shape)
    is_target = labels != IGNORE_INDEX
    check_classes(labels, num_relations, "labels", "num_labels")
    positions = heads - ROOT_HEAD
    if not torch.compiler.is_compiling():
        targets = host_copy(heads)[host_copy(is_target)]
        invalid = targets[(targets < ROOT_HEAD) | (targets >= labels.shape[1])]
        if invalid.numel():
            raise CtxError(
                f"heads contains {int(invalid[0])}, outside [{ROOT_HEAD}, words={labels.shape[1]}).",
                hint=f"use the column of the head, or {ROOT_HEAD} for the root.",
            )
    return (positions * num_relations + labels).masked_fill(~is_target, IGNORE_INDEX)


def edge_loss(edge_scores: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
    """Mean cross-entropy in nats of the edges.

    Args:
        edge_scores: (batch, words, heads * relations).
        labels: (batch, words) classes, see `edge_labels`.
        num_items: As in `number_of_targets`.

    Raises:
        CtxError: A head is the word itself, or not a word of its sentence.
    """
    loss = cross_entropy_over_targets(edge_scores, labels, "labels", num_items)
    if not torch.compiler.is_compiling():
        target_scores = edge_scores.detach().gather(2, labels.clamp(min=0)[..., None])[..., 0]
        is_excluded = (target_scores == torch.finfo(edge_scores.dtype).min) & (labels != IGNORE_INDEX)
        if bool((is_excluded := host_copy(is_excluded)).any()):
            raise CtxError(
                f"The head of the word in (row, column) {tuple(is_excluded.nonzero()[0].tolist())} is no other word of "
                "its sentence.",
                location="heads",
                hint=f"use the column of a word, or {ROOT_HEAD} for the root.",
            )
    return loss


def best_relations(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., heads, relations) scores -> (..., heads) log-probability of the best relation to each head, and its
    index."""
    best_scores, relations = logits.detach().float().max(-1)
    log_normalizer = logits.detach().float().flatten(-2).logsumexp(-1, keepdim=True)
    return best_scores - log_normalizer, relations
