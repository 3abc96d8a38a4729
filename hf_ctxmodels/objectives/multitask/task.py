"""The interface of a pretraining task (Sun et al. 2020, section 4.2)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data.documents import LabelledPair
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument

# Rows of the table of task embeddings: the three kinds of tasks in the paper, since the released table has three rows.
WORD, STRUCTURE, SEMANTIC = 0, 1, 2


class TaskRow(NamedTuple):
    """A row of a task.

    Attributes:
        segments: One or two segments, (tokens,) each.
        token_targets: (tokens,) class of each token for each segment; None for no such target.
        target: The class of the row, or -100.
        words: (tokens,) units for each segment; None where nothing is masked.
    """

    segments: tuple[np.ndarray, ...]
    token_targets: tuple[np.ndarray, ...] | None = None
    target: int = IGNORE_INDEX
    words: tuple[np.ndarray, ...] | None = None


class DocumentTask(ABC):
    """A task whose examples are made of running text.

    Attributes:
        name: Its name in the schedule; its targets in a batch are `<name>_labels`.
        kind: The row of the table of task embeddings.
        of_tokens: Whether the target is a class of each token, not of the row.
        classes: Number of classes.

    Args:
        rooms: Tokens of text in a row of one segment, and of two.
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    of_tokens: ClassVar[bool] = False
    classes: int = 2

    def __init__(self, rooms: tuple[int, int]) -> None:
        self.room, self.pair_room = rooms

    @abstractmethod
    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """The rows of a document with at least one sentence.

        Args:
            document: The document.
            others: Other documents, from which segments may be drawn.
            rng: The generator of the document and the task.
        """


class PairTask(ABC):
    """A task on labelled pairs of texts.

    Attributes: those of `DocumentTask`, and
        labels: The labels, in lower case, of classes 0, 1, ...
    """

    name: ClassVar[str]
    kind: ClassVar[int] = SEMANTIC
    of_tokens: ClassVar[bool] = False

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    def row(self, pair: LabelledPair, first: np.ndarray, second: np.ndarray) -> TaskRow:
        """The row of a pair with one of `labels`, and its tokenised texts."""
        return TaskRow((first, second), target=self.labels.index(pair.label.lower()))
