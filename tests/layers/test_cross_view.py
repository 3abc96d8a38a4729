"""The views of cross-view training against loops, and how far predictions are from each other."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

from hf_ctxmodels.models.cvt.cross_view import (
    TEXT_VIEWS,
    WORD_VIEWS,
    TextPredictors,
    WordPredictors,
    summed_consistency_loss,
)

WIDTH = 3
# Left and right padding, two sequences in a row, a row of one word, and one without padding.
SEQUENCES = torch.tensor(
    [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
)


def states(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(*SEQUENCES.shape, 2 * WIDTH) * (SEQUENCES != 0)[..., None]


@pytest.mark.parametrize(("name", "half", "step"), [("future", 0, -1), ("past", 1, 1)])
def test_a_neighbour_of_the_same_sequence(name: str, half: int, step: int) -> None:
    given = states()
    seen = WORD_VIEWS[name](given, SEQUENCES)
    rows, length = SEQUENCES.shape
    for row in range(rows):
        for place in range(length):
            other = place + step
            same = 0 <= other < length and SEQUENCES[row, place] != 0
            same = same and bool(SEQUENCES[row, other] == SEQUENCES[row, place])
            whole = given[row, other] if same else torch.zeros(2 * WIDTH)
            assert seen[row, place].equal(whole.split(WIDTH)[half])


@pytest.mark.parametrize("views", [WORD_VIEWS, TEXT_VIEWS], ids=["words", "texts"])
def test_each_sees_one_direction(views: dict) -> None:
    first, second = states(0), states(1)
    for name, view in views.items():
        half = slice(0, WIDTH) if name in ("forward", "future", "beginning") else slice(WIDTH, None)
        mixed = second.clone()
        mixed[..., half] = first[..., half]
        assert view(mixed, SEQUENCES).equal(view(first, SEQUENCES))
        assert not view(second, SEQUENCES).equal(view(first, SEQUENCES))


def test_beginning_and_end_see_half_of_a_text() -> None:
    predict = TextPredictors(4, WIDTH, 8, 5, None, "mean+max")
    sequences = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    torch.manual_seed(0)
    given = torch.randn(2, 6, 2 * WIDTH)
    before = predict.get_views(given, sequences)
    late, early = given.clone(), given.clone()
    late[0, 4:], late[1, 2:] = 9.0, 9.0  # behind the middle word, which both read; of four words, the last two
    early[0, :3], early[1, :2] = 9.0, 9.0
    assert predict.get_views(late, sequences)["beginning"].equal(before["beginning"])
    assert predict.get_views(early, sequences)["end"].equal(before["end"])
    for spoiled, name in ((late, "end"), (early, "beginning"), (late, "forward"), (early, "backward")):
        assert (predict.get_views(spoiled, sequences)[name] != before[name]).any(1).all()


def test_views_that_are_wanted() -> None:
    assert list(WordPredictors(4, WIDTH, 8, 5, None).get_views(states(), SEQUENCES)) == list(WORD_VIEWS)
    assert list(WordPredictors(4, WIDTH, 8, 5, ["past"]).get_views(states(), SEQUENCES)) == ["past"]


class TestDisagreement:
    def logits(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return torch.randn(6, 4, requires_grad=True), {
            name: torch.randn(6, 4, requires_grad=True) for name in ("forward", "past")
        }

    def test_is_the_divergence_of_the_students_from_the_teacher(self) -> None:
        teacher, students = self.logits()
        expected = sum(
            kl_divergence(Categorical(logits=teacher), Categorical(logits=each)).sum() for each in students.values()
        )
        torch.testing.assert_close(summed_consistency_loss(teacher, students), expected)

    def test_of_several_labels(self) -> None:
        teacher, students = self.logits()
        expected = sum(
            kl_divergence(Bernoulli(logits=teacher), Bernoulli(logits=each)).sum() for each in students.values()
        )
        found = summed_consistency_loss(teacher, students, "multi_label_classification")
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
    def test_only_students_learn(self, kind: str) -> None:
        teacher, students = self.logits()
        loss = summed_consistency_loss(teacher, students, kind)
        loss.backward()
        assert teacher.grad is None
        assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in students.values())
        same = summed_consistency_loss(teacher, {"forward": teacher.detach().clone()}, kind)
        assert float(same) == pytest.approx(0, abs=1e-5)
        assert float(loss) > 0
