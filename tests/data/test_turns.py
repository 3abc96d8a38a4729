"""Batches that take turns."""

from itertools import islice

import pytest
import torch

from hf_ctxmodels import CtxError
from hf_ctxmodels.data import TurnBatchSampler, Turns, UnlabelledCollator, without_labels

LABELLED = [{"labels": number} for number in range(5)]
OTHERS = [{"labels": 100 + number} for number in range(12)]
MORE = [{"labels": 200 + number} for number in range(3)]


def labels(turns: Turns, batches: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[turns[key]["labels"] for key in batch] for batch in batches]


def test_each_batch_is_of_one_kind_and_kinds_alternate() -> None:
    turns = Turns([LABELLED, OTHERS])
    found = labels(turns, list(islice(TurnBatchSampler(turns, 2, seed=0), 30)))
    assert all(label < 100 for batch in found[::2] for label in batch)
    assert all(label >= 100 for batch in found[1::2] for label in batch)
    first_pass = [label for batch in found[::2] for label in batch][:5]
    assert sorted(first_pass) == list(range(5))
    assert sorted(label for batch in found[1:12:2] for label in batch) == list(range(100, 112))


def test_an_epoch_is_a_pass_over_the_first() -> None:
    assert len(Turns([LABELLED, OTHERS])) == 10
    assert len(Turns([LABELLED, OTHERS, MORE], [0, 1, 2, 1])) == 20


@pytest.mark.parametrize("start", [1, 2, 7, 20])
def test_is_entered_at_any_batch(start: int) -> None:
    turns = Turns([LABELLED, OTHERS, MORE], [0, 1, 2, 1])
    whole = list(islice(TurnBatchSampler(turns, 2, seed=3), 40))
    assert list(islice(TurnBatchSampler(turns, 2, seed=3, start_batch=start), 40 - start)) == whole[start:]


def test_parts_and_order() -> None:
    with pytest.raises(CtxError, match="empty"):
        Turns([LABELLED, []])
    with pytest.raises(CtxError, match="order"):
        Turns([LABELLED, OTHERS], [0, 0])


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
