"""The views of cross-view training against loops, and how far predictions are from each other."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

from hf_ctxmodels import CtxCvtConfig
from hf_ctxmodels.models.cvt.configuration_cvt import TEXT_VIEWS, WORD_VIEWS
from hf_ctxmodels.models.cvt.modeling_cvt import CrossViewPredictors, summed_consistency_loss

WIDTH = 3
# Left and right padding, two sequences in a row, a row of one word, and one without padding.
SEQUENCES = torch.tensor(
    [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
)


def states(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(*SEQUENCES.shape, 2 * WIDTH) * (SEQUENCES != 0)[..., None]


def predictors(views: list[str] | None = None, pooling: str | None = None) -> CrossViewPredictors:
    """Predictors of five labels from views of width 3."""
    config = CtxCvtConfig(hidden_size=2 * WIDTH, prediction_size=8, num_hidden_layers=2, views=views)
    return CrossViewPredictors(config, 5, pooling)


@pytest.mark.parametrize(("name", "half", "step"), [("future", 0, -1), ("past", 1, 1)])
def test_neighbor_of_the_same_sequence(name: str, half: int, step: int) -> None:
    model, first_layer = predictors([name]), states()
    logits = model.get_views(first_layer, SEQUENCES)[name]
    rows, length = SEQUENCES.shape
    for row in range(rows):
        for column in range(length):
            neighbor = column + step
            is_same = 0 <= neighbor < length and SEQUENCES[row, column] != 0
            is_same = is_same and bool(SEQUENCES[row, neighbor] == SEQUENCES[row, column])
            state = first_layer[row, neighbor] if is_same else torch.zeros(2 * WIDTH)
            expected = model.auxiliary[f"{name}_view"](state.split(WIDTH)[half])
            torch.testing.assert_close(logits[row, column], expected)


@pytest.mark.parametrize("pooling", [None, "mean+max"], ids=["words", "texts"])
def test_view_depends_on_one_direction(pooling: str | None) -> None:
    model, first, second = predictors(pooling=pooling), states(0), states(1)
    expected, other = (model.get_views(batch, SEQUENCES) for batch in (first, second))
    assert list(expected) == list(WORD_VIEWS if pooling is None else TEXT_VIEWS)
    for name in expected:
        half = slice(0, WIDTH) if name in ("forward", "future", "beginning") else slice(WIDTH, None)
        mixed = second.clone()
        mixed[..., half] = first[..., half]
        assert model.get_views(mixed, SEQUENCES)[name].equal(expected[name])
        assert not other[name].equal(expected[name])


def test_beginning_and_end_see_half_of_a_text() -> None:
    predict = predictors(pooling="mean+max")
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
