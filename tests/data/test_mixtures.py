"""Mixtures: which part each batch, step or example is drawn from, realised rates, resume."""

from itertools import islice

import numpy as np
import pytest
import torch

from hf_ctxmodels import CtxError
from hf_ctxmodels.data import MixtureBatchSampler, RoundRobinMixture, SampledMixture, UnlabelledCollator, without_labels

LABELLED = [{"labels": number} for number in range(5)]
OTHERS = [{"labels": 100 + number} for number in range(12)]
MORE = [{"labels": 200 + number} for number in range(3)]


def labels(mixture: RoundRobinMixture, batches: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[mixture[key]["labels"] for key in batch] for batch in batches]


def test_each_batch_is_of_one_kind_and_kinds_alternate() -> None:
    mixture = RoundRobinMixture([LABELLED, OTHERS])
    found = labels(mixture, list(islice(MixtureBatchSampler(mixture, 2, seed=0), 30)))
    assert all(label < 100 for batch in found[::2] for label in batch)
    assert all(label >= 100 for batch in found[1::2] for label in batch)
    first_pass = [label for batch in found[::2] for label in batch][:5]
    assert sorted(first_pass) == list(range(5))
    assert sorted(label for batch in found[1:12:2] for label in batch) == list(range(100, 112))


def test_an_epoch_is_a_pass_over_the_first() -> None:
    assert len(RoundRobinMixture([LABELLED, OTHERS])) == 10
    assert len(RoundRobinMixture([LABELLED, OTHERS, MORE], [0, 1, 2, 1])) == 20


@pytest.mark.parametrize("start", [1, 2, 7, 20])
def test_is_entered_at_any_batch(start: int) -> None:
    mixture = RoundRobinMixture([LABELLED, OTHERS, MORE], [0, 1, 2, 1])
    whole = list(islice(MixtureBatchSampler(mixture, 2, seed=3), 40))
    assert list(islice(MixtureBatchSampler(mixture, 2, seed=3, start_batch=start), 40 - start)) == whole[start:]


def test_parts_and_order() -> None:
    with pytest.raises(CtxError, match="empty"):
        RoundRobinMixture([LABELLED, []])
    with pytest.raises(CtxError, match="order"):
        RoundRobinMixture([LABELLED, OTHERS], [0, 0])


@pytest.mark.parametrize("start", [1, 2, 7, 33])
@pytest.mark.parametrize("per_step", [1, 3])
def test_drawn_turns_are_entered_at_any_batch(start: int, per_step: int) -> None:
    mixture = SampledMixture([LABELLED, OTHERS, MORE], {1: 4})
    whole = list(islice(MixtureBatchSampler(mixture, 2, seed=3, batches_per_step=per_step), 60))
    later = MixtureBatchSampler(mixture, 2, seed=3, start_batch=start, batches_per_step=per_step)
    assert list(islice(later, 60 - start)) == whole[start:]
    kinds = [{label // 100 for label in found} for found in labels(mixture, whole)]
    steps = [kinds[first : first + per_step] for first in range(0, 60, per_step)]
    assert all(len(set().union(*step)) == 1 for step in steps), "a step is of one kind"
    assert [1 in step[0] for step in steps] == [number % 4 == 0 for number in range(len(steps))]


def test_draws_are_uniform_and_by_the_seed() -> None:
    mixture, batches = SampledMixture([LABELLED, OTHERS, MORE]), np.arange(6000)
    found = mixture.choose(batches, seed=5)
    assert abs(np.bincount(found) - 2000).max() < 150  # four standard deviations
    again = found[1:] == found[:-1]
    assert abs(int(again.sum()) - 2000) < 150, "draws are independent"
    assert (mixture.choose(batches, seed=6) != found).mean() > 0.5
    assert (mixture.choose(batches[100:], seed=5) == found[100:]).all()
    assert len(mixture) == 20


def test_periods() -> None:
    with pytest.raises(CtxError, match="period of 0 steps"):
        SampledMixture([LABELLED, OTHERS], {1: 0})
    alone = SampledMixture([LABELLED], {0: 10})
    assert not alone.choose(np.arange(30), seed=0).any()


@pytest.mark.parametrize("words", [True, False])
def test_labels_become_places_to_agree_at(words: bool) -> None:
    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        assert all(set(feature) == {"labels"} for feature in features)
        return {"labels": torch.tensor([feature["labels"] for feature in features])}

    given = [[3, -100, 4], [5, 6, -100]] if words else [3, 5]
    features = [{"labels": each} for each in given]
    mixed = UnlabelledCollator(collate)([features[0], *without_labels(features[1:])])
    if words:
        assert mixed["labels"].tolist() == [[3, -100, 4], [-100, -100, -100]]
        assert mixed["views"].tolist() == [[-100, -100, -100], [1, 1, -100]]
    else:
        assert mixed["labels"].tolist() == [3, -100]
        assert mixed["views"].tolist() == [-100, 1]
