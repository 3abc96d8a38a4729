"""Endless training batches of example sets, streams and mixtures, which start at any batch and do not depend on the
number of workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import Mixture
from hf_ctxmodels.data.seeding import Stream, generator


class EndlessBatchSampler(Sampler[list[tuple[int, int]]]):
    """Base class of samplers of endless batches of `(epoch, index)`; subclasses define their order."""

    drop_last = True  # read by accelerate: every batch is full


@dataclass(eq=False)
class EpochBatchSampler(EndlessBatchSampler):
    """Endless batches: a new permutation every epoch, every example exactly once in each.

    A batch may contain the end of one epoch and the start of the next. Batch b does not depend on the preceding ones.

    Attributes:
        batch_size: Examples of a micro-batch over all processes; `accelerate` splits it (`split_batches=True`).
        start_batch: Number of the first batch.
    """

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

    def _order(self, epoch: int) -> np.ndarray:
        return generator(self.seed, epoch, 0, Stream.ORDER).permutation(self.num_examples)


@dataclass(eq=False)
class ContiguousBatchSampler(EndlessBatchSampler):
    """Endless batches of contiguous text: row r of a step continues row r of the previous step.

    Every epoch the consecutive examples, beginning with a random one and wrapping around, are cut into one sequence per
    row of a step; remaining examples are not used. Micro-batch m of a step has the rows m * batch_size to
    (m + 1) * batch_size.

    Attributes:
        contiguous_rows: Rows of a step, a multiple of `batch_size`. For the others see `EpochBatchSampler`.
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
            first = int(generator(self.seed, epoch, 0, Stream.ORDER).integers(self.num_examples))
            rows = range(micro_batch * self.batch_size, (micro_batch + 1) * self.batch_size)
            yield [(epoch, (first + row * length + position) % self.num_examples) for row in rows]


def check_contiguous_rows(num_examples: int, contiguous_rows: int) -> None:
    """Raise CtxError if there are fewer examples than contiguous rows in a step."""
    if num_examples < contiguous_rows:
        raise CtxError(
            f"{num_examples} examples cannot fill a step of {contiguous_rows} contiguous rows.",
            hint="use more text, smaller or fewer micro-batches, or a shorter max_length.",
        )


@dataclass(eq=False)
class MixtureBatchSampler(EndlessBatchSampler):
    """Endless batches of a `Mixture`, with each dataset in the order of an `EpochBatchSampler`.

    The epoch of an example is the number of passes over its dataset.
    """

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


class EndlessStream(IterableDataset, ABC):
    """Endless examples of an `ExampleStream`, independent of the number of workers; subclasses define their order.

    Every worker reads the whole stream and yields every n-th batch, of the `batch_size` of the `DataLoader` and in its
    order. To start at a later batch, earlier batches are made and discarded.
    """

    def __init__(self, stream: ExampleStream, batch_size: int, start_batch: int) -> None:
        self.stream, self.batch_size, self.start_batch = stream, batch_size, start_batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        examples = (example for epoch in count() for example in self._epoch(epoch))
        for number in count(-self.start_batch):
            batch = list(islice(examples, self.batch_size))
            if number >= 0 and number % step == first:
                yield from batch

    @abstractmethod
    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The examples of a pass in training order."""


class ShuffledStream(EndlessStream):
    """Endless examples, shuffled in a buffer; a buffer of 1 keeps the order of the text."""

    def __init__(
        self, stream: ExampleStream, batch_size: int, seed: int, start_batch: int = 0, buffer_size: int = 10_000
    ) -> None:
        super().__init__(stream, batch_size, start_batch)
        self.seed, self.buffer_size = seed, buffer_size

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        rng = generator(self.seed, epoch, 0, Stream.ORDER)
        buffer: list[dict[str, Any]] = []
        for example in self.stream.one_pass(epoch):
            if len(buffer) < self.buffer_size:
                buffer.append(example)
                continue
            slot = int(rng.integers(len(buffer)))
            yield buffer[slot]
            buffer[slot] = example
        yield from (buffer[slot] for slot in rng.permutation(len(buffer)))


class ContiguousStream(EndlessStream):
    """Endless examples of contiguous text, as `ContiguousBatchSampler`, for text that exceeds memory.

    The text is read in blocks of `stretch` examples per row, so a row is contiguous for `stretch` steps. Examples at
    the end of a pass that do not fill a step are not used.
    """

    def __init__(
        self, stream: ExampleStream, batch_size: int, contiguous_rows: int, start_batch: int = 0, stretch: int = 64
    ) -> None:
        super().__init__(stream, batch_size, start_batch)
        self.contiguous_rows, self.stretch = contiguous_rows, stretch

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        examples = self.stream.one_pass(epoch)
        total = 0
        while block := list(islice(examples, self.contiguous_rows * self.stretch)):
            total += len(block)
            length = len(block) // self.contiguous_rows
            for offset in range(length):
                yield from block[offset : length * self.contiguous_rows : length]
        check_contiguous_rows(total, self.contiguous_rows)


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
) -> DataLoader:
    """Endless training batches from `start_batch` on, independent of the number of workers.

    Args:
        batch_size: Examples of a micro-batch over all processes. With several, prepare the loader with an `Accelerator`
            with `DataLoaderConfiguration(split_batches=True, dispatch_batches=False)`.
        workers: Background processes; 0 for none.
        contiguous_rows: Rows of a step of contiguous text (see `ContiguousBatchSampler`); None to shuffle.
        batches_per_step: Micro-batches per optimizer step, for a `SampledMixture`.
    """
    # A loader with persistent workers keeps its iterator, through which they can be shut down.
    background: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if isinstance(examples, ExampleStream):
        stream: EndlessStream = (
            ShuffledStream(examples, batch_size, seed, start_batch)
            if contiguous_rows is None
            else ContiguousStream(examples, batch_size, contiguous_rows, start_batch)
        )
        return DataLoader(stream, batch_size=batch_size, collate_fn=collate, **background)
    sampler: Sampler[list[tuple[int, int]]]
    if isinstance(examples, Mixture):
        sampler = MixtureBatchSampler(examples, batch_size, seed, start_batch, batches_per_step)
    elif contiguous_rows is None:
        sampler = EpochBatchSampler(len(examples), batch_size, seed, start_batch)
    else:
        sampler = ContiguousBatchSampler(len(examples), batch_size, contiguous_rows, seed, start_batch)
    return DataLoader(examples, batch_sampler=sampler, collate_fn=collate, **background)
