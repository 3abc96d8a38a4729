"""Batches that take turns: of examples with labels, and of others without any."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, Subset

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.objectives.common.seeding import Stream, row_keys, uniforms

if TYPE_CHECKING:
    from hf_ctxmodels.data.examples import ExampleSet

UNLABELLED = "unlabelled"


class RoundRobinMixture(Dataset):
    """Several lists of examples, of which each batch has one kind alone, in turn (Clark et al. 2018, section 3.1).

    An epoch is a pass over the first list. The others go on by themselves: what is shorter comes again, what is longer
    is not seen whole.

    Args:
        parts: lists of features.
        order: whose turn it is, again and again; by default each once.

    Raises:
        CtxError: a part is empty, or has no turn.
    """

    def __init__(self, parts: Sequence[Any], order: Sequence[int] | None = None) -> None:
        self.parts, self.order = parts, list(range(len(parts)) if order is None else order)
        if sorted(set(self.order)) != list(range(len(parts))):
            raise CtxError(f"order={self.order} of {len(parts)} lists of examples.", hint="name each, from 0 on.")
        if not all(map(len, parts)):
            raise CtxError("One of several lists of examples is empty.", hint="leave it out.")
        sizes = [len(part) for part in parts]
        self.starts = [sum(sizes[:number]) for number in range(len(parts))]

    def __len__(self) -> int:
        return len(self.parts[0]) * len(self.order) // self.order.count(0)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        part = max(number for number, start in enumerate(self.starts) if start <= index)
        return {**self.parts[part][index - self.starts[part]], "epoch": epoch, "example_index": index}

    def turns(self, batches: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """Whose turn it is.

        Args:
            batches: (n,) numbers of micro-batches, from 0 on.
            seed: Of turns that are drawn.
            batches_per_step: Micro-batches of an optimizer step.

        Returns:
            (n,) numbers of parts.
        """
        return np.asarray(self.order)[batches % len(self.order)]


class SampledMixture(RoundRobinMixture):
    """Several lists of examples, of which every optimizer step has one kind alone: drawn anew for each, all equally
    likely (Subramanian et al. 2018, arXiv 1804.00079), but for those that come one in so many steps.

    An epoch is as many examples as there are in all.

    Args:
        parts: lists of features.
        periods: part -> one in how many steps it has, from the first on, as the released code has inference every
            tenth; it takes no part in the draws then. Left out of account where there is no other part.

    Raises:
        CtxError: a part is empty, or a period below 1.

    Example:
        >>> turns = SampledMixture([[{"a": 1}], [{"a": 2}], [{"a": 3}]], {2: 10})
        >>> (turns.turns(np.arange(40), seed=0) == 2).nonzero()[0].tolist()
        [0, 10, 20, 30]
    """

    def __init__(self, parts: Sequence[Any], periods: Mapping[int, int] | None = None) -> None:
        super().__init__(parts)
        self.periods = dict(periods or {})
        if wrong := [period for period in self.periods.values() if period < 1]:
            raise CtxError(f"One in {wrong[0]} steps.", hint="give 1 or more.")
        self.drawn = [part for part in range(len(parts)) if part not in self.periods]
        if not self.drawn:
            self.drawn, self.periods = list(range(len(parts))), {}

    @classmethod
    def of_kinds(cls, examples: "ExampleSet", column: str, periods: Mapping[int, int]) -> "SampledMixture":
        """The examples, apart by the number that `column` holds; `periods` are by that number."""
        values = examples.columns[column].values
        kinds = np.unique(values).tolist()
        parts = [Subset(examples, np.flatnonzero(values == kind).tolist()) for kind in kinds]
        return cls(parts, {kinds.index(kind): period for kind, period in periods.items() if kind in kinds})

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def turns(self, batches: np.ndarray, seed: int, batches_per_step: int = 1) -> np.ndarray:
        """See `RoundRobinMixture.turns`."""
        steps = np.asarray(batches) // batches_per_step
        keys = np.repeat(row_keys(seed, [0], [0], Stream.TURNS), len(steps))
        found = np.asarray(self.drawn)[(uniforms(keys, steps) * len(self.drawn)).astype(int)]
        for part, period in self.periods.items():
            found[steps % period == 0] = part
        return found


class MixtureBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` for `RoundRobinMixture`: each part in an order of its own, see
    `EpochBatchSampler`.

    Batch b is known without those before it.

    Args:
        examples: what takes turns.
        batch_size, seed, start_batch: see `EpochBatchSampler`.
        batches_per_step: micro-batches of an optimizer step.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(
        self, examples: RoundRobinMixture, batch_size: int, seed: int, start_batch: int = 0, batches_per_step: int = 1
    ) -> None:
        self.examples, self.batch_size, self.seed, self.start_batch = examples, batch_size, seed, start_batch
        self.batches_per_step = batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        how = (self.seed, self.batches_per_step)
        past = np.bincount(
            self.examples.turns(np.arange(self.start_batch), *how), minlength=len(self.examples.parts)
        ).tolist()
        batches = [
            iter(EpochBatchSampler(len(rows), self.batch_size, self.seed + part, past[part]))
            for part, rows in enumerate(self.examples.parts)
        ]
        for number in count(self.start_batch):
            part = int(self.examples.turns(np.array([number]), *how)[0])
            start = self.examples.starts[part]
            yield [(epoch, start + index) for epoch, index in next(batches[part])]


def without_labels(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Features marked as having no labels; those that stand in them say where there could be one."""
    return [{**feature, UNLABELLED: True} for feature in features]


class UnlabelledCollator:
    """A task's collator for batches with labels, or without: there `views` (see the heads that learn from it) take the
    place of what the labels are. What these were does not matter.

    Args:
        collate: the task's.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]) -> None:
        self._collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch with `labels` and `views`, -100 where there is none."""
        bare = [{name: value for name, value in feature.items() if name != UNLABELLED} for feature in features]
        batch = dict(self._collate(bare))
        labels = batch["labels"]
        unlabelled = torch.tensor([UNLABELLED in feature for feature in features])
        unlabelled = unlabelled.view(-1, *[1] * (labels.dim() - 1)).expand_as(labels)
        there = labels != IGNORED
        batch["views"] = torch.where(unlabelled & there, 1, IGNORED)
        batch["labels"] = labels.masked_fill(unlabelled, IGNORED)
        return batch
