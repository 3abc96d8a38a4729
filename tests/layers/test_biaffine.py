"""Bilinear scores of edges, compared with a loop over words and relations."""

import math

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.layers.biaffine import BiaffineScorer, candidate_heads

# left padding, right padding, two sentences, a single word, no padding, a position within a sentence that is no word
SEQUENCES = torch.tensor(
    [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 2, 2, 2], [0, 0, 0, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]
)
HEAD_SIZE, DEPENDENT_SIZE, RELATIONS = 6, 4, 3


def make_scorer() -> BiaffineScorer:
    torch.manual_seed(0)
    scorer = BiaffineScorer(HEAD_SIZE, DEPENDENT_SIZE, 5, RELATIONS)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return scorer


def loop_scores(scorer: BiaffineScorer, h_heads: Tensor, h_dependents: Tensor, sequences: Tensor) -> Tensor:
    """Scores by the equations of the class, -inf at edges that do not exist."""
    W = scorer.shared_weight.weight
    W_r = scorer.relation_weights.weight.view(RELATIONS, *W.shape)
    w, b = scorer.root_layer.weight, scorer.root_layer.bias
    rows, words = sequences.shape
    scores = torch.full((rows, words, 1 + words, RELATIONS), -math.inf)
    for row in range(rows):
        for t in range(words):
            dependent = scorer.dependent_layer(h_dependents[row, t]).relu()
            for r in range(RELATIONS):
                scores[row, t, 0, r] = w[r] @ dependent + b[r]
                for u in range(words):
                    if u != t and sequences[row, u] != 0 and sequences[row, u] == sequences[row, t]:
                        head = scorer.head_layer(h_heads[row, u]).relu()
                        scores[row, t, 1 + u, r] = head @ (W_r[r] + W) @ dependent
    return scores


def test_scores_equal_loop() -> None:
    """With gradients of all parameters and states."""
    scorer = make_scorer()
    h_heads = torch.randn(*SEQUENCES.shape, HEAD_SIZE, requires_grad=True)
    h_dependents = torch.randn(*SEQUENCES.shape, DEPENDENT_SIZE, requires_grad=True)
    scores, expected = scorer(h_heads, h_dependents, SEQUENCES), loop_scores(scorer, h_heads, h_dependents, SEQUENCES)
    exists = expected.isfinite()
    torch.testing.assert_close(scores[exists], expected[exists], atol=1e-5, rtol=1e-5)
    assert (scores[~exists] == torch.finfo(torch.float32).min).all()
    inputs = [h_heads, h_dependents, *scorer.parameters()]
    weights = torch.randn(int(exists.sum()))
    gradients, expected_gradients = (
        torch.autograd.grad((weights * values[exists]).sum(), inputs) for values in (scores, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)


def test_candidates_are_other_words_of_sentence() -> None:
    candidates = candidate_heads(SEQUENCES)
    assert candidates[2, 0].tolist() == [False, True, False, False, False]
    assert candidates[2, 3].tolist() == [False, False, True, False, True]
    assert candidates[5, 0].tolist() == [False, True, False, True, True]
    assert not candidates[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_edges_have_probability_zero(dtype: torch.dtype) -> None:
    """The divergence of two distributions and its gradient stay finite."""
    scorer = make_scorer().to(dtype)
    teacher, student = (
        scorer(
            torch.randn(*SEQUENCES.shape, HEAD_SIZE, dtype=dtype),
            torch.randn(*SEQUENCES.shape, DEPENDENT_SIZE, dtype=dtype),
            SEQUENCES,
        )
        for _ in range(2)
    )
    probabilities = teacher.detach().float().flatten(2).softmax(-1)
    assert (probabilities[teacher.flatten(2) == torch.finfo(dtype).min] == 0).all()
    log_probabilities = student.float().flatten(2).log_softmax(-1)
    loss = torch.nn.functional.kl_div(log_probabilities, probabilities, reduction="sum")
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in scorer.parameters())
