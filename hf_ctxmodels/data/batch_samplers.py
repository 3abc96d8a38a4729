"""The order of examples in memory: seeded, endless batches, starting at any batch."""

from collections.abc import Iterator
from itertools import count

import numpy as np
from torch.utils.data import Sampler

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.mixtures import Mixture
from hf_ctxmodels.data.seeding import Stream, generator


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)`: a new permutation every epoch, every example exactly once in each.

    A batch may contain the end of one epoch and the start of the next. Batch b does not depend on the preceding ones.

    Args:
        num_examples: Number of examples of the dataset.
        batch_size: Examples of a micro-batch over all processes; `accelerate` splits it (`split_batches=True`).
        seed: Seed of the permutations.
        start_batch: Number of the first batch.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(self, num_examples: int, batch_size: int, seed: int, start_batch: int = 0) -> None:
        if num_examples < 1 or batch_size < 1 or start_batch < 0:
            raise CtxError(
                f"Cannot make batches of {batch_size} from {num_examples} examples, starting at batch {start_batch}.",
                hint="use at least one example, a batch size of at least 1, and a start of at least 0.",
            )
        self.num_examples, self.batch_size, self.seed, self.start_batch = num_examples, batch_size, seed, start_batch

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


class ContiguousBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` of contiguous text: row r of a step continues row r of the previous step.

    Every epoch the consecutive examples, beginning with a random one and wrapping around, are cut into one sequence per
    row of a step; remaining examples are not used. Micro-batch m of a step has the rows m * batch_size to
    (m + 1) * batch_size.

    Args:
        num_examples: Number of consecutive examples.
        batch_size: Examples of a micro-batch over all processes; `accelerate` splits it (`split_batches=True`).
        contiguous_rows: Rows of a step, a multiple of `batch_size`.
        seed: Seed of the first example of each epoch.
        start_batch: Number of the first batch.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(
        self, num_examples: int, batch_size: int, contiguous_rows: int, seed: int, start_batch: int = 0
    ) -> None:
        check_contiguous_rows(num_examples, contiguous_rows)
        self.num_examples, self.batch_size, self.contiguous_rows = num_examples, batch_size, contiguous_rows
        self.seed, self.start_batch = seed, start_batch

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


class MixtureBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` of a `Mixture`, with each dataset in the order of an `EpochBatchSampler`.

    The epoch of an example is the number of passes over its dataset.

    Args:
        mixture: The mixture.
        batch_size, seed, start_batch: See `EpochBatchSampler`.
        batches_per_step: Micro-batches per optimizer step.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(
        self, mixture: Mixture, batch_size: int, seed: int, start_batch: int = 0, batches_per_step: int = 1
    ) -> None:
        self.mixture, self.batch_size, self.seed, self.start_batch = mixture, batch_size, seed, start_batch
        self.batches_per_step = batches_per_step

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
