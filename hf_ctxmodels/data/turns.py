"""Batches that take turns: of examples with labels, and of others without any."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.errors import CtxError

UNLABELLED = "unlabelled"
_IGNORED = -100


class Turns(Dataset):
    """Several lists of examples, of which each batch has one kind alone, in turn (Clark et al. 2018, section 3.1).

    An epoch is a pass over the first list. The others go on by themselves: what is shorter comes again, what is longer
    is not seen whole.

    Args:
        parts: lists of features.
        order: whose turn it is, again and again; by default each once.

    Raises:
        CtxError: a part is empty, or has no turn.
    """

    def __init__(self, parts: Sequence[Sequence[Mapping[str, Any]]], order: Sequence[int] | None = None) -> None:
        self.parts, self.order = parts, list(range(len(parts)) if order is None else order)
        if sorted(set(self.order)) != list(range(len(parts))):
            raise CtxError(f"order={self.order} of {len(parts)} lists of examples.", mend="name each, from 0 on.")
        if not all(map(len, parts)):
            raise CtxError("One of several lists of examples is empty.", mend="leave it out.")
        sizes = [len(part) for part in parts]
        self.starts = [sum(sizes[:number]) for number in range(len(parts))]

    def __len__(self) -> int:
        return len(self.parts[0]) * len(self.order) // self.order.count(0)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        part = max(number for number, start in enumerate(self.starts) if start <= index)
        return {**self.parts[part][index - self.starts[part]], "epoch": epoch, "example_index": index}


class TurnBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless batches of `(epoch, index)` for `Turns`: each part in an order of its own, see `EpochBatchSampler`.

    Batch b is known without those before it.

    Args:
        examples: what takes turns.
        batch_size, seed, start_batch: see `EpochBatchSampler`.
    """

    drop_last = True  # read by accelerate: every batch is full

    def __init__(self, examples: Turns, batch_size: int, seed: int, start_batch: int = 0) -> None:
        self.examples, self.batch_size, self.seed, self.start_batch = examples, batch_size, seed, start_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = self.examples.order
        rounds, turn = divmod(self.start_batch, len(order))
        batches = []
        for part, rows in enumerate(self.examples.parts):
            before = rounds * order.count(part) + order[:turn].count(part)
            batches.append(iter(EpochBatchSampler(len(rows), self.batch_size, self.seed + part, before)))
        for number in count(self.start_batch):
            part = order[number % len(order)]
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
        there = labels != _IGNORED
        batch["views"] = torch.where(unlabelled & there, 1, _IGNORED)
        batch["labels"] = labels.masked_fill(unlabelled, _IGNORED)
        return batch
