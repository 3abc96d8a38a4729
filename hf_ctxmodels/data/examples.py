"""Tokenized examples: as flat arrays in memory or in files, or as a stream."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import Documents

Example = dict[str, np.ndarray | int]
"""A tokenized example: token-wise columns as 1-D integer arrays of equal length, and integers."""

LOOP_COLUMNS = ("epoch", "example_index")  # seed and identify an example; not arguments of a forward
EXAMPLES_PER_BLOCK = 8192  # examples collected before they are concatenated


class ExampleBuilder(Protocol):
    """The part of the interface of `hf_ctxmodels.objectives.Objective` that makes examples."""

    is_divisible: ClassVar[bool]
    statistics: Counter[str]

    def for_part(self, number: int) -> Self:
        """The objective for a part of the text."""

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Tokenized examples of the documents."""

    def check(self, examples: "ExampleSet") -> None:
        """Raise CtxError if the examples of all training text do not suit the objective."""


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table of examples, stored flat.

    Attributes:
        values: The values of all examples, concatenated; uint16 token ids of files are read as int32.
        offsets: (examples + 1,) example i is `values[offsets[i]:offsets[i + 1]]`; None for one number per example.
    """

    values: np.ndarray
    offsets: np.ndarray | None

    def __getitem__(self, index: int) -> np.ndarray | int:
        if self.offsets is None:
            return int(self.values[index])
        values = self.values[self.offsets[index] : self.offsets[index + 1]]
        return values.astype(np.int32) if values.dtype == np.uint16 else values


class ExampleBlock(Protocol):
    """Consecutive examples of an `ExampleSet`, with the same columns in all blocks."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """Name -> values of the examples."""


@dataclass(frozen=True)
class MemoryBlock:
    """Examples in memory, about four bytes per token."""

    columns: dict[str, Column]


class ExampleSet(torch.utils.data.Dataset):
    """Examples in memory, or in files that are mapped into memory (`data.prepared`).

    `examples[i]` and `examples[epoch, i]` are dictionaries with the columns of example i, and `example_index` and
    `epoch`, which seed the collators' masks. The epoch of `examples[i]` is set by `set_epoch` (0 at first), which
    `transformers.Trainer` calls for training but not for evaluation.

    Args:
        blocks: The examples.
        sizes: (blocks,) number of examples of each block.
        statistics: Counts of the objective that made them.
    """

    def __init__(self, blocks: Sequence[ExampleBlock], sizes: Sequence[int], statistics: Mapping[str, int]) -> None:
        self.blocks, self.statistics = blocks, dict(statistics)
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.epoch = 0

    @classmethod
    def build(cls, examples: Iterable[Example], statistics: Mapping[str, int] | None = None) -> Self:
        """Store examples with the same columns in memory; raises CtxError if there is none."""
        columns, length = build_columns(examples)
        if not length:
            raise no_examples_error()
        return cls([MemoryBlock(columns)], [length], statistics or {})

    @classmethod
    def concatenate(cls, sets: Sequence["ExampleSet"]) -> Self:
        """The examples of several sets, without their statistics."""
        blocks = [block for examples in sets for block in examples.blocks]
        return cls(blocks, [size for examples in sets for size in np.diff(examples._starts)], {})

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (self.epoch, key)
        if not -len(self) <= index < len(self):
            raise IndexError(f"Example {index} of a set of {len(self)}.")
        index = int(index) % len(self)
        number = 0 if len(self.blocks) == 1 else int(np.searchsorted(self._starts, index, side="right")) - 1
        position = index - int(self._starts[number])
        example = {name: column[position] for name, column in self.blocks[number].columns.items()}
        return {**example, "example_index": index, "epoch": int(epoch)}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of `examples[i]`."""
        self.epoch = epoch

    def column_values(self, name: str) -> Iterator[np.ndarray]:
        """The values of a column in each block, concatenated over its examples."""
        return (block.columns[name].values for block in self.blocks)


def build_columns(examples: Iterable[Example]) -> tuple[dict[str, Column], int]:
    """The columns of examples, and their number, which may be 0."""
    remaining, length = iter(examples), 0
    blocks: list[dict[str, Column]] = []
    while block := list(islice(remaining, EXAMPLES_PER_BLOCK)):
        blocks.append(_to_columns(block))
        length += len(block)
    # popped, so that blocks are freed column by column
    names = list(blocks[0]) if blocks else []
    return {name: _concatenate([block.pop(name) for block in blocks]) for name in names}, length


def _to_columns(block: list[Example]) -> dict[str, Column]:
    columns = {}
    for name, first in block[0].items():
        values = [example[name] for example in block]
        if isinstance(first, np.ndarray):
            lengths = [len(value) for value in values]  # type: ignore[arg-type]
            columns[name] = Column(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))
        else:
            columns[name] = Column(np.array(values), None)
    return columns


def _concatenate(columns: list[Column]) -> Column:
    values = np.concatenate([column.values for column in columns])
    if columns[0].offsets is None:
        return Column(values, None)
    lengths = np.concatenate([np.diff(column.offsets) for column in columns if column.offsets is not None])
    return Column(values, np.concatenate([[0], np.cumsum(lengths)]))


class ExampleStream(ABC):
    """Examples made during training, for large text."""

    @abstractmethod
    def one_pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The examples of one pass over the text, with `example_index` and `epoch`."""

    def part_streams(self) -> "list[list[ExampleStream]]":
        """The streams of the parts of each source."""
        return [[self]]


@dataclass(frozen=True)
class DocumentStream(ExampleStream):
    """The examples of an objective: in the first pass the same as the `ExampleSet` of the documents; later passes read
    the documents again and sample new pairs.

    Attributes:
        first_index: The `example_index` of the first example.
        may_be_empty: Make no examples instead of raising an error; for one of several parts.
    """

    documents: Iterable[list[str]]
    objective: ExampleBuilder
    first_index: int = 0
    may_be_empty: bool = False

    def one_pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The examples of one pass; raises CtxError if there is none."""
        index = None
        for index, example in enumerate(self.objective.examples(self.documents, epoch), self.first_index):
            yield {**example, "example_index": index, "epoch": epoch}
        if index is None and not self.may_be_empty:
            raise no_examples_error()

    def part_streams(self) -> list[list[ExampleStream]]:
        """The streams of the parts of the documents; their examples are numbered from `part << 32` on."""
        parts = self.documents.parts() if isinstance(self.documents, Documents) else []
        if len(parts) < 2:
            return [[self]]
        return [
            [
                DocumentStream(part, self.objective.for_part(number), number << 32, True)
                for number, part in enumerate(parts)
            ]
        ]


def no_examples_error() -> CtxError:
    """The error for documents without examples."""
    return CtxError("The documents have no tokens.", hint="check the dataset and the tokenizer.")
