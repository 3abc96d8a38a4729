"""Mixtures: which part each batch, step or example is drawn from, realized rates, resume."""

from itertools import islice

import numpy as np
import pytest
import torch

from hf_ctxmodels import CtxError
from hf_ctxmodels.data import (
    MixtureBatchSampler,
    ReweightedMixture,
    RoundRobinMixture,
    SampledMixture,
    ShuffledMixture,
    UnlabeledCollator,
    UnlabeledMixture,
    mark_unlabeled,
    mixing_rates,
)

LABELED = [{"labels": number} for number in range(5)]
OTHERS = [{"labels": 100 + number} for number in range(12)]
MORE = [{"labels": 200 + number} for number in range(3)]


def labels(mixture: RoundRobinMixture, batches: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[mixture[key]["labels"] for key in batch] for batch in batches]


def test_each_batch_is_of_one_kind_and_kinds_alternate() -> None:
    mixture = RoundRobinMixture([LABELED, OTHERS])
    batch_labels = labels(mixture, list(islice(MixtureBatchSampler(mixture, 2, seed=0), 30)))
    assert all(label < 100 for batch in batch_labels[::2] for label in batch)
    assert all(label >= 100 for batch in batch_labels[1::2] for label in batch)
    first_pass = [label for batch in batch_labels[::2] for label in batch][:5]
    assert sorted(first_pass) == list(range(5))
    assert sorted(label for batch in batch_labels[1:12:2] for label in batch) == list(range(100, 112))


def test_an_epoch_is_a_pass_over_the_first() -> None:
    assert len(RoundRobinMixture([LABELED, OTHERS])) == 10
    assert len(RoundRobinMixture([LABELED, OTHERS, MORE], [0, 1, 2, 1])) == 20


@pytest.mark.parametrize("start", [1, 2, 7, 20])
def test_is_entered_at_any_batch(start: int) -> None:
    mixture = RoundRobinMixture([LABELED, OTHERS, MORE], [0, 1, 2, 1])
    whole = list(islice(MixtureBatchSampler(mixture, 2, seed=3), 40))
    assert list(islice(MixtureBatchSampler(mixture, 2, seed=3, start_batch=start), 40 - start)) == whole[start:]


def test_parts_and_order() -> None:
    with pytest.raises(CtxError, match="empty"):
        RoundRobinMixture([LABELED, []])
    with pytest.raises(CtxError, match="order"):
        RoundRobinMixture([LABELED, OTHERS], [0, 0])


@pytest.mark.parametrize("start", [1, 2, 7, 33])
@pytest.mark.parametrize("per_step", [1, 3])
def test_drawn_turns_are_entered_at_any_batch(start: int, per_step: int) -> None:
    mixture = SampledMixture([LABELED, OTHERS, MORE], {1: 4})
    whole = list(islice(MixtureBatchSampler(mixture, 2, seed=3, batches_per_step=per_step), 60))
    later = MixtureBatchSampler(mixture, 2, seed=3, start_batch=start, batches_per_step=per_step)
    assert list(islice(later, 60 - start)) == whole[start:]
    kinds = [{label // 100 for label in batch} for batch in labels(mixture, whole)]
    steps = [kinds[first : first + per_step] for first in range(0, 60, per_step)]
    assert all(len(set().union(*step)) == 1 for step in steps), "a step is of one kind"
    assert [1 in step[0] for step in steps] == [number % 4 == 0 for number in range(len(steps))]


def test_draws_are_uniform_and_by_the_seed() -> None:
    mixture, batches = SampledMixture([LABELED, OTHERS, MORE]), np.arange(6000)
    choices = mixture.choose(batches, seed=5)
    assert abs(np.bincount(choices) - 2000).max() < 150  # four standard deviations
    again = choices[1:] == choices[:-1]
    assert abs(int(again.sum()) - 2000) < 150, "draws are independent"
    assert (mixture.choose(batches, seed=6) != choices).mean() > 0.5
    assert (mixture.choose(batches[100:], seed=5) == choices[100:]).all()
    assert len(mixture) == 20


@pytest.mark.parametrize("per_step", [1, 3])
def test_all_steps_of_all_parts_are_shuffled(per_step: int) -> None:
    size = 2 * per_step  # of a step
    mixture = ShuffledMixture([LABELED, OTHERS, MORE], size)
    expected = [-(-len(dataset) // size) for dataset in mixture.datasets]
    steps = sum(expected)
    assert len(mixture) == steps * size
    whole = list(islice(MixtureBatchSampler(mixture, 2, seed=3, batches_per_step=per_step), 12 * steps * per_step))
    batch_labels = labels(mixture, whole)
    windows = [batch_labels[first : first + per_step] for first in range(0, len(batch_labels), per_step)]
    kinds = [{label // 100 for batch in window for label in batch} for window in windows]
    assert all(len(step) == 1 for step in kinds), "a step is of one part"
    epochs = [[min(step) for step in kinds[first : first + steps]] for first in range(0, len(kinds), steps)]
    assert all([epoch.count(dataset) for dataset in range(3)] == expected for epoch in epochs), (
        "an epoch has every step once"
    )
    assert len(set(map(tuple, epochs))) > 1, "each epoch has an order of its own"
    for number, dataset in enumerate(mixture.datasets):
        dataset_labels = [label for batch in batch_labels for label in batch if label // 100 == number]
        passes = [
            dataset_labels[first : first + len(dataset)] for first in range(0, len(dataset_labels), len(dataset))
        ][:-1]
        assert all(sorted(each) == [item["labels"] for item in dataset] for each in passes), (
            "a pass has every example once"
        )
    for start in (1, 5, steps * per_step + 1):
        later = MixtureBatchSampler(mixture, 2, seed=3, start_batch=start, batches_per_step=per_step)
        assert list(islice(later, len(whole) - start)) == whole[start:], "entered at any batch"
    assert list(islice(MixtureBatchSampler(mixture, 2, seed=4, batches_per_step=per_step), len(whole))) != whole


def test_steps_are_drawn_by_powers_of_the_sizes() -> None:
    parts = [[{"labels": 0}] * size for size in (4000, 1000, 40)]
    steps = np.array([2000, 500, 20])
    for alpha, mixture in (
        (1.0, ReweightedMixture.tempered(parts, 2, 1.0)),
        (0.5, ReweightedMixture.tempered(parts, 2, 2.0)),
        (0.2, ReweightedMixture.annealed(parts, 2, epochs=5)),
    ):
        expected = steps**alpha / (steps**alpha).sum()
        epoch = 4  # the last
        choices = mixture.choose(np.arange(epoch * 2520, (epoch + 1) * 2520), seed=1)
        spread = np.sqrt(2520 * expected * (1 - expected))
        assert (abs(np.bincount(choices, minlength=3) - 2520 * expected) < 4 * spread).all(), alpha
        assert (mixture.choose(np.arange(epoch * 2520 + 7, epoch * 2520 + 60), seed=1) == choices[7:60]).all()
    annealed = ReweightedMixture.annealed(parts, 2, epochs=5)
    assert annealed.alphas == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert annealed.probabilities(0) == pytest.approx(steps / steps.sum())
    assert annealed.probabilities(9) == pytest.approx(annealed.probabilities(4)), "a longer run keeps the last exponent"
    assert ReweightedMixture.annealed(parts, 2, epochs=1).alphas == [1.0]
    micro = annealed.choose(np.arange(30), seed=1, batches_per_step=3)
    assert (micro.reshape(10, 3) == annealed.choose(np.arange(10), seed=1)[:, None]).all(), "a step is of one part"


def test_periods() -> None:
    with pytest.raises(CtxError, match="period of 0 steps"):
        SampledMixture([LABELED, OTHERS], {1: 0})
    alone = SampledMixture([LABELED], {0: 10})
    assert not alone.choose(np.arange(30), seed=0).any()


@pytest.mark.parametrize("words", [True, False])
def test_labels_become_places_to_agree_at(words: bool) -> None:
    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        assert all(set(feature) == {"labels"} for feature in features)
        return {"labels": torch.tensor([feature["labels"] for feature in features])}

    labels_of_features = [[3, -100, 4], [5, 6, -100]] if words else [3, 5]
    features = [{"labels": each} for each in labels_of_features]
    mixed = UnlabeledCollator(collate)([features[0], *mark_unlabeled(features[1:])])
    if words:
        assert mixed["labels"].tolist() == [[3, -100, 4], [-100, -100, -100]]
        assert mixed["views"].tolist() == [[-100, -100, -100], [1, 1, -100]]
    else:
        assert mixed["labels"].tolist() == [3, -100]
        assert mixed["views"].tolist() == [-100, 1]


@pytest.mark.parametrize(
    ("limit", "temperature", "expected"),
    [
        (None, 1, [0.8, 0.15, 0.05]),
        (600, 1, [0.6, 0.3, 0.1]),
        (None, 2, np.sqrt([1600, 300, 100]) / np.sqrt([1600, 300, 100]).sum()),
        (400, 2, np.sqrt([4, 3, 1]) / np.sqrt([4, 3, 1]).sum()),
        (None, np.inf, [1 / 3] * 3),
        (1, 1, [1 / 3] * 3),
    ],
)
def test_mixing_rates(limit: float | None, temperature: float, expected: list[float]) -> None:
    np.testing.assert_allclose(mixing_rates([1600, 300, 100], limit, temperature), expected)


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"temperature": 0.5}, {"temperature": np.nan}])
def test_mixing_rates_that_are_none(arguments: dict[str, float]) -> None:
    with pytest.raises(CtxError, match="too"):
        mixing_rates([10, 20], **arguments)


def test_each_example_of_a_sampled_mixture_is_seen_once_in_a_pass() -> None:
    """Whatever the batch size, the sequence of examples is the same."""
    mixture = SampledMixture([LABELED, OTHERS], probabilities=mixing_rates([5, 12]), is_per_example=True)
    keys = [key for batch in islice(MixtureBatchSampler(mixture, 4, seed=0), 30) for key in batch]
    assert [key for batch in islice(MixtureBatchSampler(mixture, 12, seed=0), 10) for key in batch] == keys
    for start, size in zip(mixture.starts, (5, 12), strict=True):
        first_pass = [index for epoch, index in keys if epoch == 0 and start <= index < start + size]
        assert sorted(first_pass) == list(range(start, start + size))


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_unlabeled_steps_alternate_with_the_labeled_mixture(batches_per_step: int) -> None:
    labeled = ShuffledMixture([[{"a": 1}] * 7, [{"a": 2}] * 5], step_size=2 * batches_per_step)
    mixture = UnlabeledMixture(labeled, [{"b": 1}] * 3)
    assert len(mixture) == 2 * len(labeled)
    numbers = np.arange(12 * batches_per_step)
    steps = mixture.choose(numbers, 5, batches_per_step).reshape(-1, batches_per_step)
    assert (steps == steps[:, :1]).all(), "all micro-batches of a step have one dataset"
    assert (steps[1::2] == 2).all()
    expected = labeled.choose(np.arange(6 * batches_per_step), 5, batches_per_step)
    assert steps[::2].flatten().tolist() == expected.tolist()
    assert mixture[4, 13] == {"b": 1, "epoch": 4, "example_index": 13}
