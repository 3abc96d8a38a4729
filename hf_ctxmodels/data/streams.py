"""Endless streams of examples in training order, for text that exceeds memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import SingleDocumentError, single_document_error
from hf_ctxmodels.data.examples import ExampleStream, no_examples_error
from hf_ctxmodels.data.mixtures import SampledStream, sample_choices
from hf_ctxmodels.data.seeding import Purpose, generator

POSITION_KEY = "stream_position"
"""Column of the last example of a batch, and entry of the batch, with the position of the shard after the batch."""

_MAX_EMPTY_PASSES = 20  # parts without examples are skipped; a shard reads random parts of each epoch


class EndlessStream(IterableDataset, ABC):
    """Endless examples of an `ExampleStream`, independent of the number of workers; subclasses define their order.

    Each of n workers reads the whole stream and yields every n-th batch; earlier batches are made and discarded. (A
    `ShardedStream` divides a stream of several parts.)
    """

    def __init__(self, stream: ExampleStream, batch_size: int, start_batch: int, seed: int) -> None:
        self.stream, self.batch_size, self.start_batch, self.seed = stream, batch_size, start_batch, seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        passes = (self.arrange(self.stream.one_pass(epoch), epoch) for epoch in count())
        examples = chain.from_iterable(passes)
        for number in count(-self.start_batch):
            batch = list(islice(examples, self.batch_size))
            if number >= 0 and number % step == first:
                yield from batch

    @abstractmethod
    def arrange(
        self, examples: Iterator[dict[str, Any]], epoch: int, part_number: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The examples of a pass over the text, or over a part of it, in training order."""


class ShuffledStream(EndlessStream):
    """Endless examples, shuffled in a buffer; a buffer of 1 keeps the order of the text."""

    def __init__(
        self, stream: ExampleStream, batch_size: int, seed: int, start_batch: int = 0, buffer_size: int = 10_000
    ) -> None:
        super().__init__(stream, batch_size, start_batch, seed)
        self.buffer_size = buffer_size

    def arrange(
        self, examples: Iterator[dict[str, Any]], epoch: int, part_number: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The examples in the order in which they leave the buffer at random positions."""
        rng = generator(self.seed, epoch, part_number or 0, Purpose.ORDER)
        buffer: list[dict[str, Any]] = []
        for example in examples:
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
        self,
        stream: ExampleStream,
        batch_size: int,
        contiguous_rows: int,
        start_batch: int = 0,
        stretch: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(stream, batch_size, start_batch, seed)
        self.contiguous_rows, self.stretch = contiguous_rows, stretch

    def arrange(
        self, examples: Iterator[dict[str, Any]], epoch: int, part_number: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The examples of each step, one of each row; raises CtxError if the whole text has fewer examples than a step
        has rows."""
        total = 0
        while block := list(islice(examples, self.contiguous_rows * self.stretch)):
            total += len(block)
            length = len(block) // self.contiguous_rows
            for offset in range(length):
                yield from block[offset : length * self.contiguous_rows : length]
        if part_number is None:
            check_contiguous_rows(total, self.contiguous_rows)


def check_contiguous_rows(num_examples: int, contiguous_rows: int) -> None:
    """Raise CtxError if there are fewer examples than contiguous rows in a step."""
    if num_examples < contiguous_rows:
        raise CtxError(
            f"{num_examples} examples cannot fill a step of {contiguous_rows} contiguous rows.",
            hint="use more text, smaller or fewer micro-batches, or a shorter max_length.",
        )


class ShardedStream(IterableDataset):
    """Endless examples of the parts of one or several sources for one process.

    Visit k of a source is part `k mod parts` of the order of epoch `k // parts`, a random permutation. Shard s of S
    makes visits s, s + S, s + 2 S, ..., so that every part is read once per epoch, by one shard; there may be more
    shards than parts. Each worker of each process is a shard. Contiguous text is shared by the workers of a process:
    each of n yields every n-th batch.

    A position is an integer array: the number of examples of the shard, and for each source the number of the visit and
    of the examples read in it.

    Args:
        stream: The stream of all parts, for micro-batches of this process, and the order of the examples in a part.
        num_processes: Processes, which read different parts.
        workers: Workers of this process; 0 is one shard.
    """

    def __init__(
        self,
        stream: EndlessStream,
        process_index: int = 0,
        num_processes: int = 1,
        workers: int = 0,
    ) -> None:
        self.stream, self.batch_size, self.start_batch = stream, stream.batch_size, stream.start_batch
        self.num_workers = max(1, workers)
        self.is_contiguous = isinstance(stream, ContiguousStream)
        shards_per_process = 1 if self.is_contiguous else self.num_workers
        self.num_shards = num_processes * shards_per_process
        self.shards = range(process_index * shards_per_process, (process_index + 1) * shards_per_process)
        self.sources = stream.stream.part_streams()
        self.first_visits = [0] * len(self.sources)
        self.positions: dict[int, list[int]] = {}

    def position(self, shard: int) -> list[int]:
        """The position at which a shard continues."""
        start = [0] + [number for visit in self.first_visits for number in (visit + shard, 0)]
        return list(self.positions.get(shard, start))

    def record(self, position: torch.Tensor) -> None:
        """Record the `POSITION_KEY` of a batch that was used for training."""
        shard, *numbers = position.tolist()
        self.positions[shard] = numbers

    def state_dict(self) -> dict[str, Any]:
        """The positions of the shards of this process, JSON values."""
        positions = {str(shard): numbers for shard, numbers in self.positions.items()}
        return {"num_shards": self.num_shards, "first_visits": self.first_visits, "positions": positions}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Continue from the states of all processes. Returns False if the number of shards has changed: the stream then
        continues exactly from no position, but from the first part that some shard has not finished."""
        positions = {int(shard): numbers for state in states for shard, numbers in state["positions"].items()}
        first_visits, num_shards = list(states[0]["first_visits"]), states[0]["num_shards"]
        if num_shards == self.num_shards:
            self.first_visits = first_visits
            self.positions = {shard: numbers for shard, numbers in positions.items() if shard in self.shards}
            return True
        for source, first in enumerate(first_visits):
            visits = [positions[shard][1 + 2 * source] for shard in positions]
            visits += [first + shard for shard in range(num_shards) if shard not in positions]
            first_visits[source] = min(visits)
        self.first_visits, self.positions = first_visits, {}
        return False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        worker_id = 0 if worker is None else worker.id
        # a resumed loader begins with worker 0, the run perhaps with another one
        shard = self.shards[(worker_id + self.start_batch) % len(self.shards)]
        position = self.position(shard)
        readers = [self._read(source, shard, position) for source in range(len(self.sources))]
        for number in count():
            batch = [self._next(readers, choice) for choice in self._choices(shard, position[0])]
            position[0] += self.batch_size
            batch[-1] = {**batch[-1], POSITION_KEY: np.array([shard, *position])}
            if not self.is_contiguous or number % self.num_workers == worker_id:
                yield from batch

    def _choices(self, shard: int, start: int) -> list[int]:
        """The sources of the examples of a batch, the same as in `SampledStream` for one shard."""
        if not isinstance(self.stream.stream, SampledStream):
            return [0] * self.batch_size
        numbers = np.arange(start, start + self.batch_size) * self.num_shards + shard
        return sample_choices(numbers, self.stream.stream.probabilities, self.stream.stream.seed).tolist()

    @staticmethod
    def _next(readers: Sequence[Iterator[dict[str, Any]]], choice: int) -> dict[str, Any]:
        example = next(readers[choice])
        if len(readers) == 1:
            return example
        return {**example, "example_index": example["example_index"] * len(readers) + choice}

    def _read(self, source: int, shard: int, position: list[int]) -> Iterator[dict[str, Any]]:
        """Endless examples of a source; updates the position."""
        parts, seed = self.sources[source], self.stream.seed + source
        visit, example = 1 + 2 * source, 2 + 2 * source
        num_empty, error = 0, no_examples_error()
        while True:
            epoch, index = divmod(position[visit], len(parts))
            order = generator(seed, epoch, 0, Purpose.PART_ORDER).permutation(len(parts))
            number = int(order[index])
            examples = self.stream.arrange(parts[number].one_pass(epoch), epoch, number)
            try:
                for item in islice(examples, position[example], None):
                    position[example] += 1
                    yield item
            except SingleDocumentError:
                if len(parts) == 1:
                    raise
                error = single_document_error(in_each_part=True)
            num_empty = 0 if position[example] else num_empty + 1
            if num_empty > _MAX_EMPTY_PASSES * len(parts):
                if isinstance(self.stream, ContiguousStream):
                    check_contiguous_rows(0, self.stream.contiguous_rows)
                raise error
            position[visit], position[example] = position[visit] + self.num_shards, 0


def collate_with_position(collate: Any, examples: list[dict[str, Any]]) -> Any:
    """Collate a batch of a `ShardedStream`, and add its position."""
    position = torch.as_tensor(examples[-1].pop(POSITION_KEY))
    batch = collate(examples)
    batch[POSITION_KEY] = position
    return batch
