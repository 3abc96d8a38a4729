"""Mixtures of several datasets, in a fixed cycle or sampled at random."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, Self

import numpy as np
from torch.utils.data import Dataset

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import ExampleStream
from hf_ctxmodels.data.seeding import Purpose, generator, row_hashes, uniforms

_CHUNK = 1 << 16  # choices computed together


def sample_choices(numbers: np.ndarray, probabilities: np.ndarray, seed: int) -> np.ndarray:
    """(n,) random choices among datasets, from the (n,) numbers of the choices and (datasets,) probabilities."""
    keys = np.repeat(row_hashes(seed, [0], [0], Purpose.MIXTURE), len(numbers))
    return np.searchsorted(np.cumsum(probabilities)[:-1], uniforms(keys, numbers), side="right")


class Mixture(Dataset, ABC):
    """Several non-empty datasets as one; subclasses choose the dataset of each batch or example.

    A choice depends only on the seed and its number. Each dataset is shuffled and repeated independently of the others.

    Attributes:
        starts: Index of each dataset's first example in the mixture.
        is_per_example: Whether a choice is for an example, so that batches mix datasets, or for a batch.
    """

    is_per_example: bool = False

    def __init__(self, datasets: Sequence[Any]) -> None:
        if not all(map(len, datasets)):
            raise CtxError("A dataset of the mixture is empty.", hint="remove it.")
        sizes = [len(dataset) for dataset in datasets]
        self.datasets, self.starts = datasets, [sum(sizes[:number]) for number in range(len(datasets))]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    @abstractmethod
    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the index of the dataset of each choice, from its number and the micro-batches per optimizer step."""

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        number = max(number for number, start in enumerate(self.starts) if start <= index)
        return {**self.datasets[number][index - self.starts[number]], "epoch": epoch, "example_index": index}

    def choices_before(self, number: int, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(datasets,) how often each dataset is chosen before choice `number`."""
        counts = np.zeros(len(self.datasets), dtype=np.int64)
        for start in range(0, number, _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, number))
            counts += np.bincount(self.choose(numbers, seed, batches_per_step), minlength=len(counts))
        return counts


class RoundRobinMixture(Mixture):
    """Batches of one dataset each, in a fixed cycle (Clark et al. 2018, section 2.1: labeled, unlabeled, ...).

    An epoch is a pass over the first dataset.
    """

    def __len__(self) -> int:
        return len(self.datasets[0]) * len(self.datasets)

    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) index of the dataset of each choice: its position in the cycle."""
        return numbers % len(self.datasets)


class SampledMixture(Mixture):
    """Datasets sampled with fixed probabilities, for every optimizer step or for every example.

    Sampling by step is for tasks with different losses (Subramanian et al. 2018, arXiv 1804.00079), sampling by example
    for languages (Conneau et al. 2020).

    Args:
        periods: Index of a dataset -> period in steps, starting at the first step, instead of random choices; 10 for
            natural language inference in Subramanian et al. Ignored if all datasets have one.
        probabilities: (datasets,) unnormalized probabilities; by default equal.
        is_per_example: Sample for every example, not for every step.

    Example:
        >>> tasks = SampledMixture([[{"a": 1}], [{"a": 2}], [{"a": 3}]], {2: 10})
        >>> (tasks.choose(np.arange(40), seed=0) == 2).nonzero()[0].tolist()
        [0, 10, 20, 30]
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        periods: Mapping[int, int] | None = None,
        probabilities: Sequence[float] | np.ndarray | None = None,
        is_per_example: bool = False,
    ) -> None:
        super().__init__(datasets)
        self.is_per_example = is_per_example
        self.periods = dict(periods or {})
        if invalid_periods := [period for period in self.periods.values() if period < 1]:
            raise CtxError(f"A period of {invalid_periods[0]} steps is too small.", hint="use 1 or more.")
        if len(self.periods) == len(datasets):
            self.periods = {}
        weights = np.ones(len(datasets)) if probabilities is None else np.array(probabilities, dtype=np.float64)
        weights[list(self.periods)] = 0
        self.probabilities = weights / weights.sum()

    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) random datasets, one for each step or example; those with a period at its multiples."""
        steps = numbers if self.is_per_example else numbers // batches_per_step
        choices = sample_choices(steps, self.probabilities, seed)
        for dataset, period in self.periods.items():
            choices[steps % period == 0] = dataset
        return choices


class ScheduledMixture(Mixture):
    """Optimizer steps of one dataset each, in stages with a number of steps for each dataset (Sun et al. 2020,
    "Continual Multi-task Learning").

    The steps of a dataset are spread evenly over a stage, and their number is exact. The last stage is repeated.

    Args:
        stages: For each stage index of a dataset -> number of its steps.

    Example:
        >>> mixture = ScheduledMixture([[{"a": 1}], [{"a": 2}]], [{0: 2}, {0: 2, 1: 4}])
        >>> mixture.choose(np.arange(8), seed=0).tolist()
        [0, 0, 1, 0, 1, 1, 0, 1]
    """

    def __init__(self, datasets: Sequence[Any], stages: Sequence[Mapping[int, int]]) -> None:
        super().__init__(datasets)
        if not stages or not all(stage and min(stage.values()) > 0 for stage in stages):
            raise CtxError(f"stages={list(stages)} has a dataset without a step.", hint="use 1 step or more for each.")
        orders = []
        for stage in stages:  # step k of a dataset with n steps is at (k + 1/2) / n of the stage
            steps_of_datasets = np.repeat(list(stage), list(stage.values()))
            positions = np.concatenate([(np.arange(steps) + 0.5) / steps for steps in stage.values()])
            orders.append(steps_of_datasets[np.argsort(positions, kind="stable")])
        self.order = np.concatenate(orders)
        """(steps,) the dataset of each step of all stages."""
        self.last_stage_steps = len(orders[-1])

    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the datasets of the steps, in the order of the stages; the last stage is repeated."""
        steps = numbers // batches_per_step
        earlier_stages = len(self.order) - self.last_stage_steps
        repeated = earlier_stages + (steps - earlier_stages) % self.last_stage_steps
        return self.order[np.where(steps < earlier_stages, steps, repeated)]


class EpochMixture(Mixture):
    """Optimizer steps of one dataset each, in an order that differs for every epoch; subclasses define it.

    A dataset fills `steps` optimizer steps: the batches of one pass, the last one completed by the next pass.

    Attributes:
        step_size: Examples of an optimizer step, over all micro-batches and processes.
        steps: (datasets,) number of steps of a pass over each dataset.
    """

    def __init__(self, datasets: Sequence[Any], step_size: int) -> None:
        super().__init__(datasets)
        self.step_size = step_size
        self.steps = np.array([-(-len(dataset) // step_size) for dataset in datasets])
        self._cached_order = ((-1, -1), np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return int(self.steps.sum()) * self.step_size

    @abstractmethod
    def order(self, epoch: int, seed: int) -> np.ndarray:
        """(steps of an epoch,) the index of the dataset of each step."""

    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the datasets of the steps, in the order of each epoch."""
        epochs, steps = np.divmod(numbers // batches_per_step, self.steps.sum())
        choices = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            if self._cached_order[0] != (epoch, seed):  # computed once for all batches of an epoch
                self._cached_order = ((epoch, seed), self.order(epoch, seed))
            in_epoch = epochs == epoch
            choices[in_epoch] = self._cached_order[1][steps[in_epoch]]
        return choices


class ShuffledMixture(EpochMixture):
    """All steps of all datasets, shuffled (Liu et al. 2019, arXiv 1901.11504, algorithm 1)."""

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """(steps of an epoch,) all steps of all datasets, shuffled."""
        datasets = np.repeat(np.arange(len(self.steps)), self.steps)
        return generator(seed, epoch, 0, Purpose.MIXTURE).permutation(datasets)


class ReweightedMixture(EpochMixture):
    """Every step sampled with probabilities proportional to n^alpha, n the number of steps of a dataset.

    Args:
        alphas: The exponent of each epoch; later epochs have the last one. 1 is proportional to the sizes, 0 equal.
    """

    def __init__(self, datasets: Sequence[Any], step_size: int, alphas: Sequence[float]) -> None:
        super().__init__(datasets, step_size)
        self.alphas = list(alphas)

    @classmethod
    def annealed(cls, datasets: Sequence[Any], step_size: int, epochs: int) -> Self:
        """alpha = 1 - 0.8 (e - 1) / (E - 1) in epoch e of E (Stickland & Murray 2019, arXiv 1902.02671, "annealed
        sampling")."""
        return cls(datasets, step_size, [round(1 - 0.8 * epoch / max(epochs - 1, 1), 12) for epoch in range(epochs)])

    @classmethod
    def tempered(cls, datasets: Sequence[Any], step_size: int, temperature: float) -> Self:
        """alpha = 1 / temperature."""
        return cls(datasets, step_size, [1 / temperature])

    def probabilities(self, epoch: int) -> np.ndarray:
        """(datasets,) probabilities of an epoch."""
        weights = self.steps ** float(self.alphas[min(epoch, len(self.alphas) - 1)])
        return weights / weights.sum()

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """(steps of an epoch,) datasets sampled with the probabilities of the epoch."""
        steps = int(self.steps.sum())
        return sample_choices(np.arange(epoch * steps, (epoch + 1) * steps), self.probabilities(epoch), seed)


class UnlabeledMixture(Mixture):
    """Optimizer steps of a mixture of labeled datasets in turn with steps of unlabeled examples (Clark et al. 2018,
    section 2.2). An epoch is an epoch of the labeled mixture.

    Args:
        labeled: A mixture whose choices are for batches.
        unlabeled: Examples, marked by `padding.mark_unlabeled`.
    """

    def __init__(self, labeled: Mixture, unlabeled: Sequence[Any]) -> None:
        super().__init__([*labeled.datasets, unlabeled])
        self.labeled = labeled

    def __len__(self) -> int:
        return 2 * len(self.labeled)

    def choose(self, numbers: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the datasets of the labeled mixture, and unlabeled examples in every second step."""
        steps, batches = np.divmod(numbers, batches_per_step)
        labeled = self.labeled.choose(steps // 2 * batches_per_step + batches, seed, batches_per_step)
        return np.where(steps % 2 == 0, labeled, len(self.datasets) - 1)


class SampledStream(ExampleStream):
    """Examples of several endlessly repeated streams, sampled with (streams,) probabilities for every example; the
    epoch of an example is the number of passes over its stream."""

    def __init__(self, streams: Sequence[ExampleStream], probabilities: np.ndarray, seed: int) -> None:
        self.streams, self.probabilities, self.seed = streams, probabilities, seed

    def one_pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        """All examples, endlessly; `epoch` is ignored."""
        streams = [chain.from_iterable(map(stream.one_pass, count())) for stream in self.streams]
        for first in count(0, _CHUNK):
            for choice in sample_choices(np.arange(first, first + _CHUNK), self.probabilities, self.seed).tolist():
                example = next(streams[choice])
                yield {**example, "example_index": example["example_index"] * len(streams) + choice}

    def part_streams(self) -> list[list[ExampleStream]]:
        """The streams of the parts of each stream."""
        return [streams for stream in self.streams for streams in stream.part_streams()]
