"""Counting of co-occurrences in bounded memory (Pennington et al. 2014, section 4.2)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hf_ctxmodels.objectives.base import check_at_least

_PAIRS_PER_SORT = 4_000_000
_FILES_BITS = 4  # 16 files for every spill
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: neighbouring cells land in different files


class CooccurrenceCounter:
    """Sums 1 / distance over all pairs of words at most `window` words apart.

    Cells are two sorted arrays. When there are more than `memory_cells`, they are written to files by a hash of the
    cell, and the counting starts again; at the end the files are summed one by one.

    Args:
        vocab_size: Size of the vocabulary.
        window: Largest distance in words.
        symmetric: Count each word as the other's context; else only the left one as the right one's.
        weighted: Count 1 / distance; else 1.
        memory_cells: Cells to hold in memory, 12 bytes each.
        directory: Parent of the temporary directory of the files; None for the system's.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        window: int = 10,
        symmetric: bool = True,
        weighted: bool = True,
        memory_cells: int = 50_000_000,
        directory: str | Path | None = None,
    ) -> None:
        check_at_least(1, vocab_size=vocab_size, window=window, memory_cells=memory_cells)
        self._vocab_size = np.int64(vocab_size)
        self._window, self._symmetric, self._weighted = window, symmetric, weighted
        self._memory_cells, self._directory = memory_cells, directory
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting = 0
        self._cells = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
        self._spilled: TemporaryDirectory[str] | None = None
        self.spills = 0

    def add(self, documents: Iterable[np.ndarray]) -> None:
        """Count documents, each the (words,) ids of a running text; no pair crosses documents."""
        for ids in documents:
            for distance in range(1, min(self._window, len(ids) - 1) + 1):
                left, right = ids[:-distance].astype(np.int64), ids[distance:].astype(np.int64)
                if self._symmetric:  # one of the two symmetric cells; `cells` gives both
                    left, right = np.minimum(left, right), np.maximum(left, right)
                keys = right * self._vocab_size + left
                weight = 1 / distance if self._weighted else 1.0
                self._parts.append((keys, np.full(len(keys), weight, dtype=np.float32)))
                self._waiting += len(keys)
            if self._waiting >= _PAIRS_PER_SORT:
                self._gather()

    def cells(self, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Blocks of cells in random order: (cells,) words, contexts, and float32 sums. Empties the counter."""
        self._gather()
        if self._spilled is None:
            yield from self._shuffled(*self._cells, rng)
        else:
            self._spill()
            files = sorted(Path(self._spilled.name).glob("*.npz"))
            buckets = sorted({file.name.split("-")[0] for file in files})
            for bucket in buckets:
                parts = [np.load(file) for file in files if file.name.split("-")[0] == bucket]
                summed = _sum([(part["keys"], part["values"]) for part in parts])
                yield from self._shuffled(*summed, rng)
            self._spilled.cleanup()
            self._spilled = None
        self._cells = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))

    def _gather(self) -> None:
        if not self._parts:
            return
        keys, values = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        self._parts, self._waiting = [], 0
        self._cells = _sum([self._cells, _sum([(keys, values)])])
        if len(self._cells[0]) > self._memory_cells:
            self._spill()

    def _spill(self) -> None:
        """Write the cells in memory to files by their hash; the files of one hash value fit into memory together."""
        if self._spilled is None:
            self._spilled = TemporaryDirectory(prefix="cooccurrences-", dir=self._directory)
        keys, values = self._cells
        bucket = ((keys.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - _FILES_BITS)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(2**_FILES_BITS + 1))
        for number in range(2**_FILES_BITS):
            some = order[bounds[number] : bounds[number + 1]]
            if len(some):
                path = Path(self._spilled.name) / f"{number:02d}-{self.spills:06d}.npz"
                np.savez(path, keys=keys[some], values=values[some])
        self.spills += 1
        self._cells = (keys[:0], values[:0])

    def _shuffled(
        self, keys: np.ndarray, values: np.ndarray, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        words, contexts = keys // self._vocab_size, keys % self._vocab_size
        if self._symmetric:
            mirrored = np.flatnonzero(words != contexts)
            values = np.concatenate([values, values[mirrored]])
            values[: len(keys)][words == contexts] *= 2  # each of the two is the other's context
            words, contexts = (
                np.concatenate([words, contexts[mirrored]]),
                np.concatenate([contexts, words[mirrored]]),
            )
        order = rng.permutation(len(values))
        yield words[order].astype(np.int32), contexts[order].astype(np.int32), values[order]


def _sum(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted unique keys, and the sums of their values."""
    keys, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(values, starts, dtype=np.float64).astype(np.float32)
