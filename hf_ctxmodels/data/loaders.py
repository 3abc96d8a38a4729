"""Endless training batches of example sets, streams and mixtures, independent of the number of workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from hf_ctxmodels.data.batch_samplers import (
    ContiguousBatchSampler,
    EpochBatchSampler,
    MixtureBatchSampler,
    check_contiguous_rows,
)
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import Mixture
from hf_ctxmodels.data.seeding import Stream, generator


class EndlessStream(IterableDataset, ABC):
    """Endless examples of an `ExampleStream`, independent of the number of workers; subclasses define their order.

    Every worker reads the whole stream and yields every n-th batch, in the order of `DataLoader`. To start at a later
    batch, earlier batches are made and discarded.

    Args:
        stream: The examples.
        batch_size: Examples of a micro-batch over all processes, the `batch_size` of the `DataLoader`.
        start_batch: Number of the first batch.
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
    """Endless examples, shuffled in a buffer.

    Args:
        stream, batch_size, start_batch: See `EndlessStream`.
        seed: Seed of the shuffling.
        buffer_size: Size of the shuffle buffer; 1 keeps the order of the text.
    """

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

    Args:
        stream, batch_size, start_batch: See `EndlessStream`.
        contiguous_rows: Rows of a step, a multiple of `batch_size`.
        stretch: Steps of contiguous text; `stretch * contiguous_rows` examples are in memory.
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
        examples: A set, a stream, or a mixture of sets.
        collate: The objective's collator.
        batch_size: Examples of a micro-batch over all processes. With several, prepare the loader with an `Accelerator`
            with `DataLoaderConfiguration(split_batches=True, dispatch_batches=False)`.
        seed: Seed of the order.
        start_batch: Number of the first batch.
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
