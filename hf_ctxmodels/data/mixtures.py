"""Mixtures: several data sets trained on together, and which of them each batch, step or example is drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler, Subset

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream
from hf_ctxmodels.data.seeding import Stream, row_keys, uniforms

_AT_ONCE = 1 << 16  # draws computed together


def draw_parts(draws: np.ndarray, probabilities: np.ndarray, seed: int) -> np.ndarray:
    """(n,) the part that each draw is from: independent draws with (parts,) `probabilities`.

    Args:
        draws: (n,) numbers of draws, from 0 on; each has a random number of its own.
    """
    keys = np.repeat(row_keys(seed, [0], [0], Stream.MIXTURE), len(draws))
    return np.searchsorted(np.cumsum(probabilities)[:-1], uniforms(keys, draws), side="right")


class Mixture(Dataset, ABC):
    """Several data sets as one; subclasses say which of them each draw is from.

    That is a function of the seed and the draw's number alone, so training resumes at any batch. Each part is shuffled
    by itself and repeated when it ends, whatever is drawn from the others.

    Args:
        parts: data sets, each a sequence of features.

    Attributes:
        starts: index of each part's first example in the mixture.
        by_example: a draw is an example, so that batches hold several parts; else a batch, of one part alone.

    Raises:
        CtxError: a part is empty.
    """

    by_example: bool = False

    def __init__(self, parts: Sequence[Any]) -> None:
        if not all(map(len, parts)):
            raise CtxError("One of several data sets is empty.", hint="leave it out.")
        sizes = [len(part) for part in parts]
        self.parts, self.starts = parts, [sum(sizes[:number]) for number in range(len(parts))]

    @abstractmethod
    def __len__(self) -> int:
        """Examples of an epoch."""

    @abstractmethod
    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(n,) the part that each draw is from.

        Args:
            draws: (n,) numbers of draws, from 0 on.
            seed: of parts that are drawn at random.
            batches_per_step: micro-batches of an optimizer step.
        """

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        part = max(number for number, start in enumerate(self.starts) if start <= index)
        return {**self.parts[part][index - self.starts[part]], "epoch": epoch, "example_index": index}

    def drawn_before(self, draw: int, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """(parts,) how often each part is drawn before this draw."""
        drawn = np.zeros(len(self.parts), dtype=np.int64)
        for start in range(0, draw, _AT_ONCE):
            numbers = np.arange(start, min(start + _AT_ONCE, draw))
            drawn += np.bincount(self.choose(numbers, seed, batches_per_step), minlength=len(drawn))
        return drawn


class RoundRobinMixture(Mixture):
    """Batches of one part each, in a fixed cycle (Clark et al. 2018, section 3.1: labelled, unlabelled, labelled ...).

    An epoch is a pass over the first part. The others are not in step with it: a shorter one is repeated, of a longer
    one only the beginning is seen.

    Args:
        parts: see `Mixture`.
        order: the cycle, as numbers of parts; by default each once.

    Raises:
        CtxError: a part is empty, or not in the cycle.
    """

    def __init__(self, parts: Sequence[Any], order: Sequence[int] | None = None) -> None:
        super().__init__(parts)
        self.order = list(range(len(parts)) if order is None else order)
        if sorted(set(self.order)) != list(range(len(parts))):
            raise CtxError(f"order={self.order} for {len(parts)} data sets.", hint="name each, from 0 on.")

    def __len__(self) -> int:
        return len(self.parts[0]) * len(self.order) // self.order.count(0)

    def choose(self, draws: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `Mixture.choose`."""
        return np.asarray(self.order)[draws % len(self.order)]


class SampledMixture(Mixture):
    """Parts drawn at random with fixed probabilities, for every optimizer step or for every example.

    By step is for tasks with losses of their own (Subramanian et al. 2018, arXiv 1804.00079): all micro-batches of a
    step are of one task. By example is for languages (Conneau et al. 2020), see `data.multilingual`: batches are mixed.
    An epoch is as many examples as there are in all parts.

    Args:
        parts: see `Mixture`.
        periods: part -> one in how many steps it has, from the first on, in place of random draws; Subramanian et al.
            have inference at every tenth step. Ignored where all parts have one.
        probabilities: (parts,) of the draws, in any scale; by default all are equal.
        by_example: draw for every example in place of every step.

    Raises:
        CtxError: a part is empty, or a period below 1.

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
            raise CtxError(f"One in {wrong[0]} steps.", hint="give 1 or more.")
        if len(self.periods) == len(parts):
            self.periods = {}
        weights = np.ones(len(parts)) if probabilities is None else np.array(probabilities, dtype=np.float64)
        weights[list(self.periods)] = 0
        self.probabilities = weights / weights.sum()

    @classmethod
    def by_column(cls, examples: ExampleSet, column: str, periods: Mapping[int, int]) -> "SampledMixture":
        """One part for each number in a column of the examples; `periods` are by that number."""
        values = examples.columns[column].values
        kinds = np.unique(values).tolist()
        parts = [Subset(examples, np.flatnonzero(values == kind).tolist()) for kind in kinds]
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


class SampledStream(ExampleStream):
    """Examples of several streams, each drawn at random with fixed probabilities, as by `SampledMixture` by example.

    Each part begins again when it ends, so the stream has no end; the epoch of an example is the number of passes over
    its part.

    Args:
        parts: streams.
        probabilities: (parts,) of the draws.
        seed: of the draws.
    """

    def __init__(self, parts: Sequence[ExampleStream], probabilities: np.ndarray, seed: int) -> None:
        self.parts, self.probabilities, self.seed = parts, probabilities, seed

    def one_pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        """All examples there will ever be, whatever `epoch` is."""
        streams = [part.passes() for part in self.parts]
        for first in count(0, _AT_ONCE):
            for part in draw_parts(np.arange(first, first + _AT_ONCE), self.probabilities, self.seed).tolist():
                example = next(streams[part])
                yield {**example, "example_index": example["example_index"] * len(streams) + part}


class MixtureBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` of a `Mixture`: each part in an order of its own, see `EpochBatchSampler`.

    The epoch of an example is the number of passes over its part.

    Args:
        mixture: what is drawn from.
        batch_size, seed, start_batch: see `EpochBatchSampler`.
        batches_per_step: micro-batches of an optimizer step.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(
        self, mixture: Mixture, batch_size: int, seed: int, start_batch: int = 0, batches_per_step: int = 1
    ) -> None:
        self.mixture, self.batch_size, self.seed, self.start_batch = mixture, batch_size, seed, start_batch
        self.batches_per_step = batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        mixture, how = self.mixture, (self.seed, self.batches_per_step)
        draws = self.batch_size if mixture.by_example else 1  # of a batch
        drawn = mixture.drawn_before(self.start_batch * draws, *how).tolist()
        orders = [
            iter(EpochBatchSampler(len(part), self.batch_size // draws, self.seed + number, drawn[number]))
            for number, part in enumerate(mixture.parts)
        ]
        for first in count(self.start_batch * draws, draws):
            parts = mixture.choose(np.arange(first, first + draws), *how).tolist()
            yield [(epoch, mixture.starts[part] + index) for part in parts for epoch, index in next(orders[part])]
