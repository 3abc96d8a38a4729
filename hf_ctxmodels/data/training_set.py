"""Training examples of documents (a set, a stream, or a mixture), exponential sampling of languages, endless batches.

With n_i sentences of language i and p_i = n_i / sum(n), language i is sampled with probability q_i = p_i^alpha /
sum(p^alpha) (Lample & Conneau 2019, section 3.1; Conneau et al. 2020, section 3.1). XLM uses alpha = 0.5 for its
vocabulary and 0.7 for training, XLM-R 0.3 for both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, Subset

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import Documents, SampledDocuments
from hf_ctxmodels.data.examples import DocumentStream, Example, ExampleBuilder, ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import Mixture, SampledMixture, SampledStream, ScheduledMixture
from hf_ctxmodels.data.preparation import SENTENCES, examples_of, text_parts
from hf_ctxmodels.data.seeding import Purpose, generator, permute
from hf_ctxmodels.data.streams import (
    ContiguousStream,
    EndlessStream,
    ShardedStream,
    ShuffledStream,
    check_contiguous_rows,
    collate_with_position,
)


@dataclass(frozen=True)
class ExampleSampling:
    """The order of an objective's examples in training, by default shuffled.

    Attributes:
        contiguous: Consecutive examples are contiguous text, for recurrent states (`ContiguousBatchSampler`).
        task_column: Column with the number of the task. Each optimizer step then has examples of one random task
            (`SampledMixture`).
        task_periods: Task -> period in steps, instead of random choices.
        task_stages: For each of several stages task -> number of steps (`ScheduledMixture`), instead of random choices.
    """

    contiguous: bool = False
    task_column: str | None = None
    task_periods: Mapping[int, int] = field(default_factory=dict)
    task_stages: tuple[Mapping[int, int], ...] = ()


def build_training_set(
    documents: Iterable[list[str]],
    objective: ExampleBuilder,
    sampling: ExampleSampling = ExampleSampling(),
    *,
    streaming: bool = False,
    alpha: float | None = None,
    seed: int = 0,
    progress: Callable[[Iterable[Example]], Iterable[Example]] = iter,
) -> ExampleSet | ExampleStream | Mixture:
    """Examples of an objective, in memory or as a stream, for `training_loader`.

    Args:
        sampling: The objective's `sampling`; several tasks cannot be streamed.
        streaming: Make the examples during training, for text that exceeds memory.
        alpha: Exponent of sampling the sources of the documents, one per language (see the module); None for all text
            once per epoch.
        seed: Seed of sampling a stream by `alpha`.
        progress: Wraps the examples while they are built in memory.
    """
    check_sampling(sampling, alpha)
    if alpha is not None and streaming:
        sources = split_sources(documents)
        sizes: list[int | None] = [source.num_bytes if len(source.parts()) > 1 else None for source in sources]
        if None in sizes:
            sizes = [sum(map(len, source)) for source in sources]
        probabilities = sampling_probabilities(np.array(sizes), alpha)
        return SampledStream([DocumentStream(source, objective) for source in sources], probabilities, seed)
    if sampling.task_column is not None and streaming:
        raise CtxError(
            "The objective samples a task for each step, which requires all examples.",
            location="--streaming",
            hint="omit it.",
        )
    if streaming:
        return DocumentStream(documents, objective)
    sets = []
    for number, source in enumerate([documents] if alpha is None else split_sources(documents)):
        before = Counter(objective.statistics)
        sets.append(ExampleSet.build(progress(examples_of(text_parts(source, objective, number), objective))))
        sets[-1].statistics = dict(objective.statistics - before)
    return arrange_examples(sets, objective, sampling, alpha)


def check_sampling(sampling: ExampleSampling, alpha: float | None) -> None:
    """Raise CtxError if `alpha` is out of range, or the objective's examples cannot be sampled by language."""
    if alpha is None:
        return
    sampling_probabilities([1], alpha)
    if sampling != ExampleSampling():
        raise CtxError(
            "The objective defines the order of its examples (contiguous text, or one task per step), so they cannot "
            "be sampled by language.",
            location="--sampling_alpha",
            hint="omit it, or use an objective without memory (memory_length=0, carry=false).",
        )


def arrange_examples(
    sets: Sequence[ExampleSet], objective: ExampleBuilder, sampling: ExampleSampling, alpha: float | None
) -> ExampleSet | Mixture:
    """The training set of one set of examples, or of a set for each source sampled by `alpha`."""
    check_sampling(sampling, alpha)
    if alpha is not None:
        probabilities = sampling_probabilities([examples.statistics[SENTENCES] for examples in sets], alpha)
        return SampledMixture(sets, probabilities=probabilities, is_per_example=True)
    (examples,) = sets
    objective.check(examples)
    return examples if sampling.task_column is None else mix_tasks(examples, sampling)


def mix_tasks(examples: ExampleSet, sampling: ExampleSampling) -> Mixture:
    """A dataset for each task in the `task_column`, in the order of `sampling`."""
    numbers = np.concatenate(list(examples.column_values(str(sampling.task_column))))
    tasks = np.unique(numbers).tolist()
    datasets = [Subset(examples, np.flatnonzero(numbers == task)) for task in tasks]  # type: ignore[arg-type]
    if sampling.task_stages:
        stages = [{tasks.index(task): steps for task, steps in stage.items()} for stage in sampling.task_stages]
        return ScheduledMixture(datasets, stages)
    periods = {tasks.index(task): period for task, period in sampling.task_periods.items() if task in tasks}
    return SampledMixture(datasets, periods)


def sampling_probabilities(sizes: Sequence[float] | np.ndarray, alpha: float) -> np.ndarray:
    """(languages,) probabilities q_i of languages with sizes n_i > 0; raises CtxError unless `alpha` is in [0, 1]."""
    if not 0 <= alpha <= 1:
        raise CtxError(f"sampling_alpha={alpha} is out of range.", hint="use 0 (equal shares) to 1 (as in the text).")
    weights = (np.asarray(sizes, dtype=np.float64) / np.sum(sizes)) ** alpha
    return weights / weights.sum()


def mixing_rates(
    sizes: Sequence[float] | np.ndarray, limit: float | None = None, temperature: float = 1.0
) -> np.ndarray:
    """(tasks,) probabilities of the tasks of a mixture, proportional to min(n, K)^(1/T) (Raffel et al. 2020, "T5",
    section 3.5.2).

    Args:
        sizes: (tasks,) numbers of examples n > 0, or artificial ones.
        limit: Artificial limit K of a size; None for none.
        temperature: T of 1 or more; 1 is proportional to the sizes (up to K), infinity is equal mixing.

    Raises:
        CtxError: The limit is not positive, or the temperature is below 1.

    Example:
        >>> mixing_rates([300, 100, 100], limit=200).tolist()
        [0.5, 0.25, 0.25]
    """
    if limit is not None and not limit > 0:
        raise CtxError(f"A limit of {limit} examples is too small.", hint="use a number above 0, such as 65536.")
    if not temperature >= 1:
        raise CtxError(f"A mixing temperature of {temperature} is too low.", hint="use 1 or more.")
    return sampling_probabilities(np.minimum(sizes, np.inf if limit is None else limit), 1 / temperature)


@dataclass(frozen=True)
class ResampledDocuments:
    """Text for training a vocabulary: several sources in shares by `alpha`, with the same total number of sentences.

    Documents are repeated or skipped at a constant rate per source. Iterating raises CtxError if there is one source,
    or alpha is out of range.
    """

    documents: Documents | SampledDocuments
    alpha: float

    @cached_property
    def _rates(self) -> list[tuple[Iterable[list[str]], float]]:
        """Each source and the rate of its sentences. Reads all sources once."""
        sources = split_sources(self.documents)
        sizes = np.array([sum(map(len, source)) for source in sources])
        rates = sampling_probabilities(sizes, self.alpha) * sizes.sum() / sizes
        return list(zip(sources, rates.tolist(), strict=True))

    def __iter__(self) -> Iterator[list[str]]:
        for source, rate in self._rates:
            due = 0.5  # sentences; rounds to the nearest
            for document in source:
                due += rate * len(document)
                while due >= len(document):
                    yield document
                    due -= len(document)


def split_sources(documents: Iterable[list[str]]) -> list[Any]:
    """The documents of each source; raises CtxError if there is only one."""
    sources = documents.by_source() if isinstance(documents, Documents | SampledDocuments) else []
    if len(sources) < 2:
        raise CtxError(
            "Sampling by language requires several datasets.",
            location="--sampling_alpha",
            hint="set --dataset to a file or Hub id for each language.",
        )
    return sources


LONGEST_STORED_ORDER = 1 << 20
"""Number of examples, 8 bytes each, beyond which a random order is computed on demand instead of stored."""
_ORDER_BLOCK = 1 << 13  # positions computed together


class EndlessBatchSampler(Sampler[list[tuple[int, int]]]):
    """Base class of samplers of endless batches of `(epoch, index)`; subclasses define their order."""

    drop_last = True  # read by accelerate: every batch is full


@dataclass(eq=False)
class EpochBatchSampler(EndlessBatchSampler):
    """Endless batches from number `start_batch` on: a new permutation every epoch, every example exactly once in each.
    A batch may contain the end of one epoch and the start of the next."""

    num_examples: int
    batch_size: int
    seed: int
    start_batch: int = 0

    def __post_init__(self) -> None:
        if self.num_examples < 1 or self.batch_size < 1 or self.start_batch < 0:
            raise CtxError(
                f"Cannot make batches of {self.batch_size} from {self.num_examples} examples, starting at batch "
                f"{self.start_batch}.",
                hint="use at least one example, a batch size of at least 1, and a start of at least 0.",
            )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, position = divmod(self.start_batch * self.batch_size, self.num_examples)
        order = self._order(epoch)
        while True:
            batch: list[tuple[int, int]] = []
            while len(batch) < self.batch_size:
                if position == self.num_examples:
                    epoch, position = epoch + 1, 0
                    order = self._order(epoch)
                indices = order[position : position + self.batch_size - len(batch)]
                batch += [(epoch, index) for index in indices.tolist()]
                position += len(indices)
            yield batch

    def _order(self, epoch: int) -> "np.ndarray | ComputedOrder":
        if self.num_examples > LONGEST_STORED_ORDER:
            return ComputedOrder(self.num_examples, self.seed, epoch)
        return generator(self.seed, epoch, 0, Purpose.ORDER).permutation(self.num_examples)


class ComputedOrder:
    """The random order of an epoch, computed on demand in constant memory: `order[start:stop]`."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch
        self._block = (-1, np.empty(0, dtype=np.int64))

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(self.size)
        numbers = range(start // _ORDER_BLOCK, -(-stop // _ORDER_BLOCK))
        blocks = [self._compute(number) for number in numbers]
        return np.concatenate(blocks)[start - numbers.start * _ORDER_BLOCK :][: stop - start]

    def _compute(self, number: int) -> np.ndarray:
        if self._block[0] != number:
            positions = np.arange(number * _ORDER_BLOCK, min((number + 1) * _ORDER_BLOCK, self.size))
            self._block = (number, permute(positions, self.size, self.seed, self.epoch))
        return self._block[1]


@dataclass(eq=False)
class ContiguousBatchSampler(EndlessBatchSampler):
    """Endless batches of contiguous text: row r of a step continues row r of the previous step.

    Every epoch the consecutive examples, beginning with a random one and wrapping around, are cut into one sequence per
    row of a step; remaining examples are not used. Micro-batch m of a step has the rows m * batch_size to
    (m + 1) * batch_size.

    Attributes:
        contiguous_rows: Rows of a step, a multiple of `batch_size`.
    """

    num_examples: int
    batch_size: int
    contiguous_rows: int
    seed: int
    start_batch: int = 0

    def __post_init__(self) -> None:
        check_contiguous_rows(self.num_examples, self.contiguous_rows)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        length = self.num_examples // self.contiguous_rows  # steps of an epoch
        for number in count(self.start_batch):
            step, micro_batch = divmod(number, self.contiguous_rows // self.batch_size)
            epoch, position = divmod(step, length)
            first = int(generator(self.seed, epoch, 0, Purpose.ORDER).integers(self.num_examples))
            rows = range(micro_batch * self.batch_size, (micro_batch + 1) * self.batch_size)
            yield [(epoch, (first + row * length + position) % self.num_examples) for row in rows]


@dataclass(eq=False)
class MixtureBatchSampler(EndlessBatchSampler):
    """Endless batches of a `Mixture`, with each dataset in the order of an `EpochBatchSampler`; the epoch of an example
    is the number of passes over its dataset."""

    mixture: Mixture
    batch_size: int
    seed: int
    start_batch: int = 0
    batches_per_step: int = 1

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        mixture = self.mixture
        choices_per_batch = self.batch_size if mixture.is_per_example else 1
        start = self.start_batch * choices_per_batch
        choices_before = mixture.choices_before(start, self.seed, self.batches_per_step).tolist()
        samplers = [
            iter(
                EpochBatchSampler(
                    len(dataset), self.batch_size // choices_per_batch, self.seed + number, choices_before[number]
                )
            )
            for number, dataset in enumerate(mixture.datasets)
        ]
        for first in count(start, choices_per_batch):
            choices = mixture.choose(np.arange(first, first + choices_per_batch), self.seed, self.batches_per_step)
            yield [
                (epoch, mixture.starts[dataset] + index)
                for dataset in choices.tolist()
                for epoch, index in next(samplers[dataset])
            ]


def training_loader(
    examples: ExampleSet | ExampleStream | Mixture,
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    *,
    batch_size: int,
    seed: int,
    start_batch: int = 0,
    workers: int = 0,
    contiguous_rows: int | None = None,
    batches_per_step: int = 1,
    process_index: int = 0,
    num_processes: int = 1,
) -> DataLoader:
    """Endless training batches from `start_batch` on, independent of the number of workers, except for a stream of
    several parts (`ShardedStream`).

    Args:
        batch_size: Examples of a micro-batch over all processes. With several, prepare the loader with an `Accelerator`
            with `DataLoaderConfiguration(split_batches=True, dispatch_batches=False)`; the batches of a `ShardedStream`
            are this process's share.
        workers: Background processes; 0 for none.
        contiguous_rows: Rows of a step of contiguous text (see `ContiguousBatchSampler`); None to shuffle.
        batches_per_step: Micro-batches per optimizer step, for a `Mixture`.
    """
    # A loader with persistent workers keeps its iterator, through which they can be shut down.
    background: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if isinstance(examples, ExampleStream):
        is_sharded = any(len(streams) > 1 for streams in examples.part_streams())
        divisor = num_processes if is_sharded else 1
        batch_size //= divisor
        stream: EndlessStream = (
            ShuffledStream(examples, batch_size, seed, start_batch)
            if contiguous_rows is None
            else ContiguousStream(examples, batch_size, contiguous_rows // divisor, start_batch, seed=seed)
        )
        if is_sharded:
            sharded = ShardedStream(stream, process_index, num_processes, workers)
            collate = partial(collate_with_position, collate)
            return DataLoader(sharded, batch_size=batch_size, collate_fn=collate, **background)
        return DataLoader(stream, batch_size=batch_size, collate_fn=collate, **background)
    sampler: Sampler[list[tuple[int, int]]]
    if isinstance(examples, Mixture):
        sampler = MixtureBatchSampler(examples, batch_size, seed, start_batch, batches_per_step)
    elif contiguous_rows is None:
        sampler = EpochBatchSampler(len(examples), batch_size, seed, start_batch)
    else:
        sampler = ContiguousBatchSampler(len(examples), batch_size, contiguous_rows, seed, start_batch)
    return DataLoader(examples, batch_sampler=sampler, collate_fn=collate, **background)
