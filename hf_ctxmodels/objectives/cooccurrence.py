"""Co-occurrence counts of words (Pennington et al. 2014): the objective of GloVe."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.objectives.base import Objective

_COLUMNS = ("input_ids", "context_ids", "cooccurrences")
_PAIRS_PER_SORT = 4_000_000
_FILES_BITS = 4  # 16 files for every spill
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing distributes neighboring cells over the files


@dataclass
class DataCollatorForCooccurrence(PaddingCollator):
    """Pads sequences of cells of the co-occurrence matrix.

    Each feature holds input_ids, context_ids (cells,) and cooccurrences (cells,) float.

    Returns: input_ids, attention_mask (batch, width) int64; labels (batch, width), the contexts, -100 at padding;
    cooccurrences (batch, width) float32, 1 at padding.
    """

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad features; see the class for their columns and the returned ones."""
        padder = RowPadder([len(feature["input_ids"]) for feature in features], "right")
        sums = np.ones(padder.filled.shape, dtype=np.float32)
        sums[padder.filled] = np.concatenate([np.asarray(feature["cooccurrences"]) for feature in features])
        words, contexts = ([np.asarray(feature[name]) for feature in features] for name in ("input_ids", "context_ids"))
        return {
            "input_ids": padder.pad(words, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": padder.pad(contexts, IGNORE_INDEX),
            "cooccurrences": torch.from_numpy(sums),
        }


@dataclass
class Cooccurrence(DataCollatorForCooccurrence, Objective):
    """GloVe's objective: fit the logarithms of co-occurrence counts, with the defaults of section 4.2.

    The whole text is counted once; an example is `max_length` cells of the co-occurrence matrix, in random order. There
    is no evaluation: counts grow with the size of the text, so the counts of held-out text are not targets.

    | document | example | targets |
    |---|---|---|
    | running text | words and their contexts, one pair per cell | the co-occurrence count of each pair |

    References: Pennington et al. 2014, sections 3 and 4.2.
    Related: `SkipGram` predicts the words of a window without counting first.

    Example:
        >>> Cooccurrence(tokenizer, max_length=1024, seed=0, window=10)
    """

    auto_class = "AutoModelForPreTraining"
    has_heldout_loss = False
    is_divisible = False
    window: int = flag(10, "Maximum distance in words.")
    symmetric: bool = flag(True, "Contexts on both sides; False: on the left only.")
    distance_weighting: bool = flag(True, "Count 1 / distance for two words; False: 1.")
    memory_cells: int = flag(50_000_000, "Cells in memory, 12 bytes each; more are written to files.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "window", "memory_cells", at_least=1)

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, context_ids and cooccurrences."""
        counter = CooccurrenceCounter(
            len(self.tokenizer), self.window, self.symmetric, self.distance_weighting, self.memory_cells
        )
        for document in self.tokenized(documents):
            counter.add(document.ids[document.ids != self.tokenizer.unk_token_id])
        rng = generator(self.seed, epoch, 0, Purpose.ORDER)
        remaining: list[np.ndarray] = []
        for block in counter.cells(rng):
            self.statistics["cells"] += len(block[0])
            columns = [np.concatenate(arrays) for arrays in zip(remaining, block)] if remaining else list(block)
            full = len(columns[0]) // self.max_length * self.max_length
            for start in range(0, full, self.max_length):
                yield dict(zip(_COLUMNS, (column[start : start + self.max_length] for column in columns)))
            remaining = [column[full:] for column in columns]
        if remaining and len(remaining[0]):
            yield dict(zip(_COLUMNS, remaining))

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Cells, and cells with a sum of at most 1."""
        cells = batch["labels"] != IGNORE_INDEX
        return {"cells": int(cells.sum()), "single_cells": int((cells & (batch["cooccurrences"] <= 1)).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Share of the cells with a sum of at most 1."""
        return {"single_cell_share": counts["single_cells"] / max(1, counts["cells"])}


class CooccurrenceCounter:
    """Sums 1 / distance over all pairs of words at most `window` words apart.

    Cells are two sorted arrays. If there are more than `memory_cells`, they are written to files by a hash of the cell,
    and counting starts again; at the end the files are summed one by one.

    Args:
        window, symmetric, weighted, memory_cells: See `Cooccurrence`.
        directory: Parent of the temporary directory of the files; None for the system directory.
    """

    def __init__(
        self,
        vocab_size: int,
        window: int = 10,
        symmetric: bool = True,
        weighted: bool = True,
        memory_cells: int = 50_000_000,
        directory: str | Path | None = None,
    ) -> None:
        self._vocab_size = np.int64(vocab_size)
        self._window, self._symmetric, self._weighted = window, symmetric, weighted
        self._memory_cells, self._directory = memory_cells, directory
        self._uncounted: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_uncounted = 0
        self._cells = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
        self._spilled: TemporaryDirectory[str] | None = None
        self.spills = 0

    def add(self, ids: np.ndarray) -> None:
        """Count the pairs of a document, the (words,) ids of a running text."""
        for distance in range(1, min(self._window, len(ids) - 1) + 1):
            words, contexts = ids[distance:].astype(np.int64), ids[:-distance].astype(np.int64)
            if self._symmetric:  # one of the two symmetric cells; `cells` yields both
                words, contexts = np.maximum(words, contexts), np.minimum(words, contexts)
            keys = words * self._vocab_size + contexts
            weight = 1 / distance if self._weighted else 1.0
            self._uncounted.append((keys, np.full(len(keys), weight, dtype=np.float32)))
            self._num_uncounted += len(keys)
        if self._num_uncounted >= _PAIRS_PER_SORT:
            self._sum_uncounted()

    def cells(self, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Blocks of cells in random order: (cells,) words, contexts, and float32 sums. Empties the counter."""
        self._sum_uncounted()
        if self._spilled is None:
            yield from self._shuffled(*self._cells, rng)
        else:
            self._spill()
            files = sorted(Path(self._spilled.name).glob("*.npz"))
            buckets = sorted({file.name.split("-")[0] for file in files})
            for bucket in buckets:
                arrays = [np.load(file) for file in files if file.name.split("-")[0] == bucket]
                summed = _sum([(array["keys"], array["values"]) for array in arrays])
                yield from self._shuffled(*summed, rng)
            self._spilled.cleanup()
            self._spilled = None
        self._cells = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))

    def _sum_uncounted(self) -> None:
        if not self._uncounted:
            return
        keys, values = (np.concatenate(column) for column in zip(*self._uncounted, strict=True))
        self._uncounted, self._num_uncounted = [], 0
        self._cells = _sum([self._cells, _sum([(keys, values)])])
        if len(self._cells[0]) > self._memory_cells:
            self._spill()

    def _spill(self) -> None:
        """Write the cells in memory to files by their hash; the files of one hash value together fit into memory."""
        if self._spilled is None:
            self._spilled = TemporaryDirectory(prefix="cooccurrences-", dir=self._directory)
        keys, values = self._cells
        bucket = ((keys.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - _FILES_BITS)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(2**_FILES_BITS + 1))
        for number in range(2**_FILES_BITS):
            cells = order[bounds[number] : bounds[number + 1]]
            if len(cells):
                path = Path(self._spilled.name) / f"{number:02d}-{self.spills:06d}.npz"
                np.savez(path, keys=keys[cells], values=values[cells])
        self.spills += 1
        self._cells = (keys[:0], values[:0])

    def _shuffled(
        self, keys: np.ndarray, values: np.ndarray, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        words, contexts = keys // self._vocab_size, keys % self._vocab_size
        if self._symmetric:
            mirrored = np.flatnonzero(words != contexts)
            values = np.concatenate([values, values[mirrored]])
            values[: len(keys)][words == contexts] *= 2  # each occurrence is a context of the other
            words, contexts = np.append(words, contexts[mirrored]), np.append(contexts, words[mirrored])
        order = rng.permutation(len(values))
        yield words[order].astype(np.int32), contexts[order].astype(np.int32), values[order]


def _sum(arrays: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted unique keys, and the sums of their values."""
    keys, values = (np.concatenate(column) for column in zip(*arrays, strict=True))
    if not len(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(values, starts, dtype=np.float64).astype(np.float32)
