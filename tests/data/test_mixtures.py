"""Mixtures of datasets: sampling order, realized rates and resuming."""

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

FIRST = [{"labels": number} for number in range(5)]
SECOND = [{"labels": 100 + number} for number in range(12)]
THIRD = [{"labels": 200 + number} for number in range(3)]


def labels(mixture: RoundRobinMixture, batches: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[mixture[key]["labels"] for key in batch] for batch in batches]


def test_round_robin_alternates_datasets() -> None:
    mixture = RoundRobinMixture([FIRST, SECOND])
    batch_labels = labels(mixture, list(islice(MixtureBatchSampler(mixture, 2, seed=0), 30)))
    assert all(label < 100 for batch in batch_labels[::2] for label in batch)
    assert all(label >= 100 for batch in batch_labels[1::2] for label in batch)
    first_pass = [label for batch in batch_labels[::2] for label in batch][:5]
    assert sorted(first_pass) == list(range(5))
    assert sorted(label for batch in batch_labels[1:12:2] for label in batch) == list(range(100, 112))


def test_round_robin_epoch_is_one_pass_over_first_dataset() -> None:
    assert len(RoundRobinMixture([FIRST, SECOND])) == 10
    assert len(RoundRobinMixture([FIRST, SECOND, THIRD])) == 15


@pytest.mark.parametrize("start", [1, 2, 7, 20])
def test_round_robin_resumes_at_any_batch(start: int) -> None:
    mixture = RoundRobinMixture([FIRST, SECOND, THIRD])
    batches = list(islice(MixtureBatchSampler(mixture, 2, seed=3), 40))
    assert list(islice(MixtureBatchSampler(mixture, 2, seed=3, start_batch=start), 40 - start)) == batches[start:]


def test_invalid_round_robin_raises() -> None:
    with pytest.raises(CtxError, match="empty"):
        RoundRobinMixture([FIRST, []])


@pytest.mark.parametrize("start", [1, 2, 7, 33])
@pytest.mark.parametrize("per_step", [1, 3])
def test_sampled_mixture_resumes_at_any_batch(start: int, per_step: int) -> None:
    mixture = SampledMixture([FIRST, SECOND, THIRD], {1: 4})
    batches = list(islice(MixtureBatchSampler(mixture, 2, seed=3, batches_per_step=per_step), 60))
    resumed = MixtureBatchSampler(mixture, 2, seed=3, start_batch=start, batches_per_step=per_step)
    assert list(islice(resumed, 60 - start)) == batches[start:]
    datasets = [{label // 100 for label in batch} for batch in labels(mixture, batches)]
    steps = [datasets[first : first + per_step] for first in range(0, 60, per_step)]
    assert all(len(set().union(*step)) == 1 for step in steps), "a step has one dataset"
    assert [1 in step[0] for step in steps] == [number % 4 == 0 for number in range(len(steps))]


def test_sampled_mixture_is_uniform_and_seeded() -> None:
    mixture, batches = SampledMixture([FIRST, SECOND, THIRD]), np.arange(6000)
    choices = mixture.choose(batches, seed=5)
    assert abs(np.bincount(choices) - 2000).max() < 150  # four standard deviations
    repeats = choices[1:] == choices[:-1]
    assert abs(int(repeats.sum()) - 2000) < 150, "choices are independent"
    assert (mixture.choose(batches, seed=6) != choices).mean() > 0.5
    assert (mixture.choose(batches[100:], seed=5) == choices[100:]).all()
    assert len(mixture) == 20


@pytest.mark.parametrize("per_step", [1, 3])
def test_shuffled_mixture_covers_all_steps(per_step: int) -> None:
    size = 2 * per_step  # examples per step
    mixture = ShuffledMixture([FIRST, SECOND, THIRD], size)
    expected = [-(-len(dataset) // size) for dataset in mixture.datasets]
    steps = sum(expected)
    assert len(mixture) == steps * size
    batches = list(islice(MixtureBatchSampler(mixture, 2, seed=3, batches_per_step=per_step), 12 * steps * per_step))
    batch_labels = labels(mixture, batches)
    windows = [batch_labels[first : first + per_step] for first in range(0, len(batch_labels), per_step)]
    dataset_ids = [{label // 100 for batch in window for label in batch} for window in windows]
    assert all(len(step) == 1 for step in dataset_ids), "a step has one dataset"
    epochs = [[min(step) for step in dataset_ids[first : first + steps]] for first in range(0, len(dataset_ids), steps)]
    assert all([epoch.count(dataset) for dataset in range(3)] == expected for epoch in epochs), (
        "an epoch has every step once"
    )
    assert len(set(map(tuple, epochs))) > 1, "epochs differ in order"
    for number, dataset in enumerate(mixture.datasets):
        dataset_labels = [label for batch in batch_labels for label in batch if label // 100 == number]
        passes = [
            dataset_labels[first : first + len(dataset)] for first in range(0, len(dataset_labels), len(dataset))
        ][:-1]
        assert all(sorted(labels_of_pass) == [item["labels"] for item in dataset] for labels_of_pass in passes), (
            "a pass has every example once"
        )
    for start in (1, 5, steps * per_step + 1):
        resumed = MixtureBatchSampler(mixture, 2, seed=3, start_batch=start, batches_per_step=per_step)
        assert list(islice(resumed, len(batches) - start)) == batches[start:], "resumed at any batch"
    assert list(islice(MixtureBatchSampler(mixture, 2, seed=4, batches_per_step=per_step), len(batches))) != batches


def test_reweighted_mixture_follows_exponents() -> None:
    datasets = [[{"labels": 0}] * size for size in (4000, 1000, 40)]
    steps = np.array([2000, 500, 20])
    for alpha, mixture in (
        (1.0, ReweightedMixture.tempered(datasets, 2, 1.0)),
        (0.5, ReweightedMixture.tempered(datasets, 2, 2.0)),
        (0.2, ReweightedMixture.annealed(datasets, 2, epochs=5)),
    ):
        expected = steps**alpha / (steps**alpha).sum()
        epoch = 4  # the last epoch
        choices = mixture.choose(np.arange(epoch * 2520, (epoch + 1) * 2520), seed=1)
        spread = np.sqrt(2520 * expected * (1 - expected))
        assert (abs(np.bincount(choices, minlength=3) - 2520 * expected) < 4 * spread).all(), alpha
        assert (mixture.choose(np.arange(epoch * 2520 + 7, epoch * 2520 + 60), seed=1) == choices[7:60]).all()
    annealed = ReweightedMixture.annealed(datasets, 2, epochs=5)
    assert annealed.alphas == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert annealed.probabilities(0) == pytest.approx(steps / steps.sum())
    assert annealed.probabilities(9) == pytest.approx(annealed.probabilities(4)), "a longer run keeps the last exponent"
    assert ReweightedMixture.annealed(datasets, 2, epochs=1).alphas == [1.0]
    micro = annealed.choose(np.arange(30), seed=1, batches_per_step=3)
    assert (micro.reshape(10, 3) == annealed.choose(np.arange(10), seed=1)[:, None]).all(), "a step has one dataset"


def test_sampling_period() -> None:
    with pytest.raises(CtxError, match="period of 0 steps"):
        SampledMixture([FIRST, SECOND], {1: 0})
    mixture = SampledMixture([FIRST], {0: 10})
    assert not mixture.choose(np.arange(30), seed=0).any()


@pytest.mark.parametrize("token_labels", [True, False])
def test_unlabeled_collator_marks_consistency_positions(token_labels: bool) -> None:
    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        assert all(set(feature) == {"labels"} for feature in features)
        return {"labels": torch.tensor([feature["labels"] for feature in features])}

    labels = [[3, -100, 4], [5, 6, -100]] if token_labels else [3, 5]
    features = [{"labels": label} for label in labels]
    mixed = UnlabeledCollator(collate)([features[0], *mark_unlabeled(features[1:])])
    if token_labels:
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
def test_invalid_mixing_rates_raise(arguments: dict[str, float]) -> None:
    with pytest.raises(CtxError, match="too"):
        mixing_rates([10, 20], **arguments)


def test_sampled_mixture_passes_cover_each_example_once() -> None:
    """The order of examples does not depend on the batch size."""
    mixture = SampledMixture([FIRST, SECOND], probabilities=mixing_rates([5, 12]), is_per_example=True)
    keys = [key for batch in islice(MixtureBatchSampler(mixture, 4, seed=0), 30) for key in batch]
    assert [key for batch in islice(MixtureBatchSampler(mixture, 12, seed=0), 10) for key in batch] == keys
    for start, size in zip(mixture.starts, (5, 12), strict=True):
        first_pass = [index for epoch, index in keys if epoch == 0 and start <= index < start + size]
        assert sorted(first_pass) == list(range(start, start + size))


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_unlabeled_and_labeled_steps_alternate(batches_per_step: int) -> None:
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
