"""Conditional random fields against an enumeration of all label sequences."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.layers.crf import FORBIDDEN, ConditionalRandomField, Constraints, Scores, max_marginals, viterbi

LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y"]
MASKS = {
    "right": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]],
    "left": [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]],
    "inside": [[1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]],
}


def is_valid(labels: tuple[int, ...]) -> bool:
    """BIO: an I- label continues an entity of its type."""
    names = ["O", *(LABELS[label] for label in labels)]
    return all(name[0] != "I" or previous[2:] == name[2:] for previous, name in pairwise(names))


def all_scores(emissions: Tensor, scores: Scores, constrained: bool) -> dict[tuple[int, ...], Tensor]:
    """Score of each (valid) label sequence of one unpadded sentence (words, labels)."""
    sequences = {}
    for labels in product(range(emissions.shape[1]), repeat=len(emissions)):
        if is_valid(labels) or not constrained:
            total = scores.starts[labels[0]] + scores.ends[labels[-1]]
            for word, label in enumerate(labels):
                total = total + emissions[word, label]
                if word:
                    total = total + scores.transitions[labels[word - 1], label]
            sequences[labels] = total
    return sequences


def random_field(constrained: bool) -> ConditionalRandomField:
    field = ConditionalRandomField(len(LABELS), Constraints.bio(LABELS) if constrained else None)
    for parameter in field.parameters():
        torch.nn.init.normal_(parameter)
    return field


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "bio"])
def test_likelihood_and_gradients_equal_enumeration(mask: str, constrained: bool) -> None:
    torch.manual_seed(len(mask))
    field, is_word = random_field(constrained), torch.tensor(MASKS[mask], dtype=torch.bool)
    emissions = torch.randn(3, 4, len(LABELS), requires_grad=True)
    labels = torch.full((3, 4), IGNORE_INDEX)
    # a valid sequence, one with an unlabeled word, one that starts inside an entity
    for row, tags in enumerate(([1, 2, 0], [3, IGNORE_INDEX], [2])):
        labels[row][is_word[row]] = torch.tensor(tags)[: int(is_word[row].sum())]
    free = Scores(field.transitions, field.starts, field.ends)
    expected = []
    for row in range(3):
        targets = labels[row][is_word[row]].tolist()
        if not targets:
            expected.append(torch.zeros(()))
            continue
        sequences = all_scores(emissions[row][is_word[row]], free, constrained and is_valid(tuple(targets[:1])))
        observed = [
            score
            for sequence, score in sequences.items()
            if all(target in (label, IGNORE_INDEX) for label, target in zip(sequence, targets, strict=True))
        ]
        expected.append(torch.stack(observed).logsumexp(0) - torch.stack([*sequences.values()]).logsumexp(0))
    for complete in (False, True):  # without unlabeled words there is a faster path
        rows = torch.tensor([0, 2] if complete else [0, 1, 2])
        likelihood = field.log_likelihood(emissions[rows], is_word[rows], labels[rows])
        reference = torch.stack(expected)[rows]
        torch.testing.assert_close(likelihood, reference, atol=1e-5, rtol=1e-5)
        inputs, weights = (emissions, *field.parameters()), torch.tensor([1.0, 2.0, 3.0])[rows]
        gradients = torch.autograd.grad((likelihood * weights).sum(), inputs)
        expected_gradients = torch.autograd.grad((reference * weights).sum(), inputs, retain_graph=True)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "bio"])
def test_viterbi_and_max_marginals_equal_enumeration(mask: str, constrained: bool) -> None:
    torch.manual_seed(7)
    field, is_word = random_field(constrained), torch.tensor(MASKS[mask], dtype=torch.bool)
    emissions = torch.randn(3, 4, len(LABELS))
    scores = field.scores()
    labels, margins = viterbi(emissions, is_word, scores), max_marginals(emissions, is_word, scores)
    assert (labels[~is_word] == IGNORE_INDEX).all()
    assert not margins[~is_word].any()
    assert (margins.argmax(-1)[is_word] == labels[is_word]).all()
    for row in range(3):
        if is_word[row].any():
            free = Scores(field.transitions, field.starts, field.ends)
            sequences = all_scores(emissions[row][is_word[row]], free, constrained)
            best = max(sequences, key=lambda sequence: float(sequences[sequence]))
            assert tuple(labels[row][is_word[row]].tolist()) == best
            for word, position in enumerate(is_word[row].nonzero()[:, 0]):
                for label in range(len(LABELS)):
                    totals = [score for sequence, score in sequences.items() if sequence[word] == label]
                    if totals:
                        margin = max(totals) - sequences[best]
                        torch.testing.assert_close(margins[row, position, label], margin, atol=1e-5, rtol=1e-5)
                    else:
                        assert margins[row, position, label] < FORBIDDEN / 2


def test_max_marginals_with_ties_are_valid() -> None:
    """Two paths with the same score: `argmax` must not mix them."""
    emissions = torch.full((1, 2, len(LABELS)), -9.0)
    emissions[0, 0, [1, 3]], emissions[0, 1, [2, 4]] = 1.0, 1.0  # B-X I-X or B-Y I-Y
    scores = ConditionalRandomField(len(LABELS), Constraints.bio(LABELS)).scores()
    is_word = torch.ones(1, 2, dtype=torch.bool)
    labels = max_marginals(emissions, is_word, scores).argmax(-1)[0].tolist()
    assert labels in ([1, 2], [3, 4])
    assert labels == viterbi(emissions, is_word, scores)[0].tolist()


def test_constraints_apply_only_to_bio_labels() -> None:
    constraints = Constraints.bio([*LABELS, "I-Z", "NOUN"])
    allowed = {
        (previous, label)
        for i, previous in enumerate([*LABELS, "I-Z", "NOUN"])
        for j, label in enumerate([*LABELS, "I-Z", "NOUN"])
        if not constraints.transitions[i, j]
    }
    assert {previous for previous, label in allowed if label == "I-Y"} == {"B-Y", "I-Y"}
    assert {previous for previous, label in allowed if label == "I-Z"} == {*LABELS, "I-Z", "NOUN"}
    assert constraints.starts.tolist() == [False, False, True, False, True, False, False]
