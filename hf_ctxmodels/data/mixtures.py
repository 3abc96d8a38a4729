"""Mixtures of several data sets, in a fixed cycle or sampled at random."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler, Subset

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream
from hf_ctxmodels.data.seeding import Stream, generator, row_hashes, uniforms

_AT_ONCE = 1 << 16  # draws computed together


def draw_parts(draws: np.ndarray, probabilities: np.ndarray, seed: int) -> np.ndarray:
    """(n,) the part of each draw: independent draws with (parts,) `probabilities`.

    Args:
        draws: (n,) indices of draws, which determine the random numbers.
    """
    keys = np.repeat(row_hashes(seed, [0], [0], Stream.MIXTURE), len(draws))
    return np.searchsorted(np.cumsum(probabilities)[:-1], uniforms(keys, draws), side="right")


class Mixture(Dataset, ABC):
    """Several data sets as one; subclasses choose the part of each draw.

    The choice depends only on the seed and the index of the draw, so training resumes at any batch. Each part is
    shuffled and repeated independently of the others.

    Args:
        parts: Data sets, each a sequence of features.

    Attributes:
        starts: Index of each part's first example in the mixture.
        by_example: Whether a draw is an example, so that batches mix parts, or a batch of a single part.

    Raises:
        CtxError: A part is empty.
    """

    by_example: bool = False

    def __init__(self, parts: Sequence[Any]) -> None:
        if not all(map(len, parts)):
            raise CtxError("A data set of the mixture is empty.", hint="leave it out.")
        sizes = [len(part) for part in parts]
        self.parts, self.starts = parts, [sum(sizes[:number]) for number in range(len(parts))]

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples of an epoch."""

    @abstractmethod
    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the part of each draw.

        Args:
            draws: (n,) indices of draws.
            seed: Seed of random choices.
            batches_per_step: Micro-batches per optimizer step.
        """

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        part = max(number for number, start in enumerate(self.starts) if start <= index)
        return {**self.parts[part][index - self.starts[part]], "epoch": epoch, "example_index": index}

    def draws_before(self, draw: int, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(parts,) number of draws of each part before this draw."""
        drawn = np.zeros(len(self.parts), dtype=np.int64)
        for start in range(0, draw, _AT_ONCE):
            numbers = np.arange(start, min(start + _AT_ONCE, draw))
            drawn += np.bincount(self.choose(numbers, seed, batches_per_step), minlength=len(drawn))
        return drawn


class RoundRobinMixture(Mixture):
    """Batches of one part each, in a fixed cycle (Clark et al. 2018, section 3.1: labelled, unlabelled, labelled ...).

    An epoch is a pass over the first part, during which shorter parts are repeated and longer ones are seen in part.

    Args:
        parts: See `Mixture`.
        order: The cycle, as indices of parts; by default each once.

    Raises:
        CtxError: A part is empty, or not in the cycle.
    """

    def __init__(self, parts: Sequence[Any], order: Sequence[int] | None = None) -> None:
        super().__init__(parts)
        self.order = list(range(len(parts)) if order is None else order)
        if sorted(set(self.order)) != list(range(len(parts))):
            raise CtxError(f"order={self.order} for {len(parts)} data sets.", hint="give the index of each data set.")

    def __len__(self) -> int:
        return len(self.parts[0]) * len(self.order) // self.order.count(0)

    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `Mixture.choose`."""
        return np.asarray(self.order)[draws % len(self.order)]


class SampledMixture(Mixture):
    """Parts sampled with fixed probabilities, for every optimizer step or for every example.

    Sampling by step is for tasks with different losses (Subramanian et al. 2018, arXiv 1804.00079): all micro-batches
    of a step belong to the same task. Sampling by example is for languages (Conneau et al. 2020), see
    `data.language_sampling`. The length of an epoch is the number of examples of all parts.

    Args:
        parts: See `Mixture`.
        periods: Part -> period in steps, beginning with the first step, in place of random draws; 10 for natural
            language inference in Subramanian et al. Ignored if all parts have one.
        probabilities: (parts,) unnormalised probabilities; by default equal.
        by_example: Sample for every example, not for every step.

    Raises:
        CtxError: A part is empty, or a period is below 1.

    Example:
        >>> tasks = SampledMixture([[{"a": 1}], [{"a": 2}], [{"a": 3}]], {2: 10})
        >>> (tasks.choose(np.arange(40), seed=0) == 2).nonzero()[0].tolist()
        [0, 10, 20, 30]
    """

    def __init__(
        self,
        parts: Sequence[Any],
        periods: Mapping[int, int] | None = None,
        probabilities: Sequence[float] | np.ndarray | None = None,
        by_example: bool = False,
    ) -> None:
        super().__init__(parts)
        self.by_example = by_example
        self.periods = dict(periods or {})
        if wrong := [period for period in self.periods.values() if period < 1]:
            raise CtxError(f"A period of {wrong[0]} steps is too small.", hint="use 1 or more.")
        if len(self.periods) == len(parts):
            self.periods = {}
        weights = np.ones(len(parts)) if probabilities is None else np.array(probabilities, dtype=np.float64)
        weights[list(self.periods)] = 0
        self.probabilities = weights / weights.sum()

    @classmethod
    def by_column(cls, examples: ExampleSet, column: str, periods: Mapping[int, int]) -> "SampledMixture":
        """One part for each value of a column; `periods` are by value."""
        kinds, parts = split_by_column(examples, column)
        return cls(parts, {kinds.index(kind): period for kind, period in periods.items() if kind in kinds})

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `Mixture.choose`."""
        steps = draws if self.by_example else draws // batches_per_step
        parts = draw_parts(steps, self.probabilities, seed)
        for part, period in self.periods.items():
            parts[steps % period == 0] = part
        return parts


def split_by_column(examples: ExampleSet, column: str) -> tuple[list[int], list[Subset]]:
    """The values of a column, ascending, and the examples of each."""
    values = examples.columns[column].values
    kinds = np.unique(values).tolist()
    return kinds, [Subset(examples, np.flatnonzero(values == kind).tolist()) for kind in kinds]


class ScheduledMixture(Mixture):
    """Optimizer steps of one part each, in stages with a given number of steps of every part (Sun et al. 2020, section
    3.2, "continual multi-task learning").

    The steps of a stage are spread evenly over it, so that its numbers are exact. The last stage is repeated.

    Args:
        parts: See `Mixture`.
        stages: For each stage part -> number of its steps.

    Raises:
        CtxError: A part is empty, or a stage has no step.

    Example:
        >>> mixture = ScheduledMixture([[{"a": 1}], [{"a": 2}]], [{0: 2}, {0: 2, 1: 4}])
        >>> mixture.choose(np.arange(8), seed=0).tolist()
        [0, 0, 1, 0, 1, 1, 0, 1]
    """

    def __init__(self, parts: Sequence[Any], stages: Sequence[Mapping[int, int]]) -> None:
        super().__init__(parts)
        if not stages or not all(stage and min(stage.values()) > 0 for stage in stages):
            raise CtxError(f"stages={list(stages)} has a part without a step.", hint="give 1 step or more for each.")
        self.orders = [_spread(stage) for stage in stages]
        self.ends = np.cumsum([len(order) for order in self.orders])

    @classmethod
    def by_column(cls, examples: ExampleSet, column: str, stages: Sequence[Mapping[int, int]]) -> "ScheduledMixture":
        """One part for each value of a column; `stages` are by value."""
        kinds, parts = split_by_column(examples, column)
        return cls(parts, [{kinds.index(kind): steps for kind, steps in stage.items()} for stage in stages])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `Mixture.choose`."""
        steps = draws // batches_per_step
        last = len(self.orders[-1])
        before = self.ends[-1] - last
        return np.concatenate(self.orders)[np.where(steps < before, steps, before + (steps - before) % last)]


def _spread(stage: Mapping[int, int]) -> np.ndarray:
    """(steps,) the part of each step of a stage: step k of a part with n steps lies at the share (k + 1/2) / n of
    it."""
    parts = np.repeat(list(stage), list(stage.values()))
    places = np.concatenate([(np.arange(steps) + 0.5) / steps for steps in stage.values()])
    return parts[np.argsort(places, kind="stable")]


class EpochMixture(Mixture):
    """Optimizer steps of one part each, in an order of their own for every epoch; subclasses define it.

    A part fills `steps` optimizer steps: its batches of one pass, the last one completed by the next pass.

    Args:
        parts: See `Mixture`.
        step_size: Examples of an optimizer step, over all micro-batches and processes.

    Attributes:
        steps: (parts,) number of steps of a pass over each part.

    Raises:
        CtxError: A part is empty.
    """

    def __init__(self, parts: Sequence[Any], step_size: int) -> None:
        super().__init__(parts)
        self.step_size = step_size
        self.steps = np.array([-(-len(part) // step_size) for part in parts])
        self._latest: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self.steps.sum()) * self.step_size

    @abstractmethod
    def order(self, epoch: int, seed: int) -> np.ndarray:
        """(steps of an epoch,) the part of each step."""

    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `Mixture.choose`."""
        epochs, places = np.divmod(draws // batches_per_step, self.steps.sum())
        parts = np.empty(len(draws), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            parts[here] = self._kept_order(epoch, seed)[places[here]]
        return parts

    def _kept_order(self, epoch: int, seed: int) -> np.ndarray:
        """`order`, computed once for all batches of an epoch."""
        if self._latest is None or self._latest[0] != (epoch, seed):
            self._latest = ((epoch, seed), self.order(epoch, seed))
        return self._latest[1]


class ShuffledMixture(EpochMixture):
    """All steps of all parts, shuffled: an epoch is a pass over every part (Liu et al. 2019, arXiv 1901.11504,
    algorithm 1).

    Example:
        >>> mixture = ShuffledMixture([[{"a": 1}] * 6, [{"a": 2}] * 2], step_size=2)
        >>> sorted(mixture.order(epoch=0, seed=0).tolist())
        [0, 0, 0, 1]
    """

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """See `EpochMixture.order`."""
        parts = np.repeat(np.arange(len(self.steps)), self.steps)
        return generator(seed, epoch, 0, Stream.MIXTURE).permutation(parts)


class ReweightedMixture(EpochMixture):
    """Every step drawn with probabilities proportional to n^alpha, n the number of steps of a part.

    Args:
        parts, step_size: See `EpochMixture`.
        alphas: The exponent of each epoch; later epochs have the last one. 1 is in proportion to the parts, 0 equal.

    Example:
        >>> ReweightedMixture.annealed([[{"a": 1}] * 4, [{"a": 2}]], step_size=1, epochs=3).alphas
        [1.0, 0.6, 0.2]
    """

    def __init__(self, parts: Sequence[Any], step_size: int, alphas: Sequence[float]) -> None:
        super().__init__(parts, step_size)
        self.alphas = list(alphas)

    @classmethod
    def annealed(cls, parts: Sequence[Any], step_size: int, epochs: int) -> "ReweightedMixture":
        """alpha = 1 - 0.8 (e - 1) / (E - 1) in epoch e of E (Stickland & Murray 2019, arXiv 1902.02671)."""
        return cls(parts, step_size, [round(1 - 0.8 * epoch / max(epochs - 1, 1), 12) for epoch in range(epochs)])

    @classmethod
    def tempered(cls, parts: Sequence[Any], step_size: int, temperature: float) -> "ReweightedMixture":
        """alpha = 1 / temperature."""
        return cls(parts, step_size, [1 / temperature])

    def probabilities(self, epoch: int) -> np.ndarray:
        """(parts,) probabilities of an epoch."""
        weights = self.steps ** float(self.alphas[min(epoch, len(self.alphas) - 1)])
        return weights / weights.sum()

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """See `EpochMixture.order`."""
        steps = int(self.steps.sum())
        return draw_parts(np.arange(epoch * steps, (epoch + 1) * steps), self.probabilities(epoch), seed)


class SampledStream(ExampleStream):
    """Examples of several streams, sampled with fixed probabilities for every example.

    Each part is repeated, so the stream is endless; the epoch of an example is the number of passes over its part.

    Args:
        parts: Streams.
        probabilities: (parts,) probabilities.
        seed: Seed of the draws.
    """

    def __init__(self, parts: Sequence[ExampleStream], probabilities: np.ndarray, seed: int) -> None:
        self.parts, self.probabilities, self.seed = parts, probabilities, seed

    def one_pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        """All examples, without end; `epoch` is ignored."""
        streams = [part.passes() for part in self.parts]
        for first in count(0, _AT_ONCE):
            for part in draw_parts(np.arange(first, first + _AT_ONCE), self.probabilities, self.seed).tolist():
                example = next(streams[part])
                yield {**example, "example_index": example["example_index"] * len(streams) + part}


class MixtureBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` of a `Mixture`, with each part in the order of an `EpochBatchSampler`.

    The epoch of an example is the number of passes over its part.

    Args:
        mixture: The mixture.
        batch_size, seed, start_batch: See `EpochBatchSampler`.
        batches_per_step: Micro-batches per optimizer step.
    """

    drop_last = True  # for accelerate: all batches are full

    def __init__(
        self, mixture: Mixture, batch_size: int, seed: int, start_batch: int = 0, batches_per_step: int = 1
    ) -> None:
        self.mixture, self.batch_size, self.seed, self.start_batch = mixture, batch_size, seed, start_batch
        self.batches_per_step = batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        mixture, options = self.mixture, (self.seed, self.batches_per_step)
        draws = self.batch_size if mixture.by_example else 1  # per batch
        drawn = mixture.draws_before(self.start_batch * draws, *options).tolist()
        orders = [
            iter(EpochBatchSampler(len(part), self.batch_size // draws, self.seed + number, drawn[number]))
            for number, part in enumerate(mixture.parts)
        ]
        for first in count(self.start_batch * draws, draws):
            parts = mixture.choose(np.arange(first, first + draws), *options).tolist()
            yield [(epoch, mixture.starts[part] + index) for part in parts for epoch, index in next(orders[part])]
