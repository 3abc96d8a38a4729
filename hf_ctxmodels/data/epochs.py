"""The order of one set of examples in training: seeded, endless, starting at any batch."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.seeding import Stream, generator


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)`: a fresh permutation every epoch, every example exactly once in each.

    A batch may hold the end of one epoch and the start of the next. Batch b does not depend on the preceding ones.

    Args:
        num_examples: Number of examples of the set.
        batch_size: Examples of a micro-batch over all processes; `accelerate` splits it (`split_batches=True`).
        seed: Seed of the permutations.
        start_batch: Number of the first batch.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(self, num_examples: int, batch_size: int, seed: int, start_batch: int = 0) -> None:
        if num_examples < 1 or batch_size < 1 or start_batch < 0:
            raise CtxError(
                f"Cannot draw batches of {batch_size} from {num_examples} examples, starting at batch {start_batch}.",
                hint="give at least one example, a batch size of at least 1, and a start of at least 0.",
            )
        self.num_examples, self.batch_size, self.seed, self.start_batch = num_examples, batch_size, seed, start_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, place = divmod(self.start_batch * self.batch_size, self.num_examples)
        order = self._order(epoch)
        while True:
            batch: list[tuple[int, int]] = []
            while len(batch) < self.batch_size:
                if place == self.num_examples:
                    epoch, place = epoch + 1, 0
                    order = self._order(epoch)
                taken = order[place : place + self.batch_size - len(batch)]
                batch += [(epoch, index) for index in taken.tolist()]
                place += len(taken)
            yield batch

    def _order(self, epoch: int) -> np.ndarray:
        return generator(self.seed, epoch, 0, Stream.ORDER).permutation(self.num_examples)
