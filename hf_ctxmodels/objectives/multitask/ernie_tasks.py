"""The pretraining tasks of ERNIE 2.0, and their schedule (Sun et al. 2020, sections 3.2 and 4.2)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import permutations
from math import factorial
from typing import ClassVar, NamedTuple

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import LabelledPair
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument, sentence_chunks, sequence_bounds

WORD, STRUCTURE, SEMANTIC = 0, 1, 2
"""Values of `task_type`: the three types of tasks in the paper, and the three rows of the released task embeddings."""

NEIGHBOURS, SAME_DOCUMENT, OTHER_DOCUMENT = 0, 1, 2
"""Classes of `SentenceDistance`."""


class TaskExample(NamedTuple):
    """An example of a task without special tokens.

    Attributes:
        segments: One or two segments, (tokens,) each.
        token_targets: (tokens,) class of each token for each segment; None without such targets.
        target: The class of the example, or -100.
        words: (tokens,) units for each segment; None without masking.
    """

    segments: tuple[np.ndarray, ...]
    token_targets: tuple[np.ndarray, ...] | None = None
    target: int = IGNORE_INDEX
    words: tuple[np.ndarray, ...] | None = None


class DocumentTask(ABC):
    """A task with examples from running text.

    Attributes:
        name: Its name in the schedule; its targets in a batch are `<name>_labels`.
        task_type: The row of the task embeddings.
        classifies_tokens: Whether the target is a class of each token, not of the example.
        classes: Number of classes.

    Args:
        room: Tokens of text in an example of one segment.
        pair_room: Tokens of text in an example of two segments.
    """

    name: ClassVar[str]
    task_type: ClassVar[int]
    classifies_tokens: ClassVar[bool] = False
    classes: int = 2

    def __init__(self, room: int, pair_room: int) -> None:
        self.room, self.pair_room = room, pair_room

    @abstractmethod
    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document with at least one sentence.

        Args:
            document: The document.
            other_documents: Other documents, from which segments may be sampled.
            rng: The generator of the document and the task.
        """


class KnowledgeMasking(DocumentTask):
    """Predict words, phrases and entities, which the collator masks. An example is whole sentences of a document."""

    name = "knowledge_masking"
    task_type = WORD

    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document, see `DocumentTask.examples`."""
        for start, stop in sequence_bounds(document, self.room):
            words = None if document.word_ids is None else (document.word_ids[start:stop],)
            yield TaskExample((document.ids[start:stop],), words=words)


class Capitalization(DocumentTask):
    """Predict for each token whether the first letter of its word is a capital. Numbers, punctuation and letters
    without case have no target. The tokenizer must lower-case, otherwise the input contains the answer."""

    name = "capitalization"
    task_type = WORD
    classifies_tokens = True

    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document, see `DocumentTask.examples`."""
        assert document.capitals is not None
        targets = np.where(document.capitals < 0, IGNORE_INDEX, document.capitals.astype(np.int64))
        for start, stop in sequence_bounds(document, self.room):
            yield TaskExample((document.ids[start:stop],), (targets[start:stop],))


class TokenDocumentRelation(DocumentTask):
    """Predict for each token of a segment whether it also occurs in another segment of the document.

    Segments are at most half a document, so that there are at least two. A document of one token has none.
    """

    name = "token_document"
    task_type = WORD
    classifies_tokens = True

    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document, see `DocumentTask.examples`."""
        ids = document.ids
        if len(ids) < 2:
            return
        for start, stop in sequence_bounds(document, min(self.room, len(ids) // 2)):
            other_ids = np.concatenate([ids[:start], ids[stop:]])
            yield TaskExample((ids[start:stop],), (np.isin(ids[start:stop], other_ids).astype(np.int64),))


class SentenceReordering(DocumentTask):
    """Predict the permutation by which the segments of a text were reordered.

    The text is as many sentences as fit. It is split at random into n segments of whole sentences, n uniform in 1 to m,
    but at most the number of sentences, and they are shuffled. The classes are the 1! + 2! + ... + m! permutations:
    first of one segment, then of two, and so on, in lexicographic order. A permutation lists the numbers of the
    segments in the order of the example.

    Args:
        room, pair_room: See `DocumentTask`.
        max_segments: m.
    """

    name = "sentence_reordering"
    task_type = STRUCTURE

    def __init__(self, room: int, pair_room: int, max_segments: int) -> None:
        super().__init__(room, pair_room)
        self.orders = [order for number in range(1, max_segments + 1) for order in permutations(range(number))]
        self.max_segments, self.classes = max_segments, len(self.orders)

    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document, see `DocumentTask.examples`."""
        for first, last in sentence_chunks(document.bounds, self.room, from_end=rng.random() < 0.5):
            segments = int(rng.integers(1, min(self.max_segments, last - first), endpoint=True))
            cuts = np.sort(first + 1 + rng.choice(last - first - 1, segments - 1, replace=False))
            bounds = document.bounds[[first, *cuts, last]]
            smaller_permutations = sum(factorial(count) for count in range(1, segments))
            target = smaller_permutations + int(rng.integers(factorial(segments)))
            reordered = [document.ids[bounds[segment] : bounds[segment + 1]] for segment in self.orders[target]]
            yield TaskExample((np.concatenate(reordered),), target=target)


class SentenceDistance(DocumentTask):
    """Predict whether two sentences are neighbours (0), others of the same document (1), or of two documents (2).

    Every sentence is the first of a pair, with a class sampled uniformly among the possible ones. Neighbours are in the
    order of the text. Sentences that do not fit are truncated.
    """

    name = "sentence_distance"
    task_type = STRUCTURE
    classes = 3

    def examples(
        self, document: TokenizedDocument, other_documents: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of a document, see `DocumentTask.examples`."""
        count = len(document)
        for number in range(count):
            before, after = max(0, number - 1), max(0, count - number - 2)  # sentences that are not neighbours
            possible = [number + 1 < count, before + after > 0, bool(other_documents)]
            if not any(possible):
                continue
            target = int(rng.choice(np.flatnonzero(possible)))
            if target == NEIGHBOURS:
                second = _sentence(document, number + 1)
            elif target == SAME_DOCUMENT:
                index = int(rng.integers(before + after))
                second = _sentence(document, index if index < before else index - before + number + 2)
            else:
                other_document = other_documents[int(rng.integers(len(other_documents)))]
                second = _sentence(other_document, int(rng.integers(len(other_document))))
            yield TaskExample(_truncate(_sentence(document, number), second, self.pair_room), target=target)


def _sentence(document: TokenizedDocument, number: int) -> np.ndarray:
    return document.ids[document.bounds[number] : document.bounds[number + 1]]


def _truncate(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate two sentences, the longer one first, so that they fit into an example."""
    half = room // 2
    return first[: max(half, room - len(second))], second[: max(room - half, room - len(first))]


class PairTask(ABC):
    """A task on labelled pairs of texts.

    Attributes: see `DocumentTask`, and
        labels: The labels, in lower case, of classes 0, 1, ...
    """

    name: ClassVar[str]
    task_type: ClassVar[int] = SEMANTIC
    classifies_tokens: ClassVar[bool] = False

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    def example(self, pair: LabelledPair, first: np.ndarray, second: np.ndarray) -> TaskExample:
        """The example of a pair with one of `labels`, and its tokenized texts."""
        return TaskExample((first, second), target=self.labels.index(pair.label.lower()))


class DiscourseRelation(PairTask):
    """Predict the relation of two sentences, such as the connective between them."""

    name = "discourse_relation"


class QueryTitleRelevance(PairTask):
    """Predict the relevance of a title for a query: clicked by the user, shown but not clicked, or neither."""

    name = "query_title"


def parse_schedule(text: str, task_names: Collection[str]) -> list[dict[str, int]]:
    """For each stage task -> number of its steps.

    Args:
        text: Stages, separated by semicolons; a stage is `task:steps`, separated by commas. The default of steps is 1,
            for one stage with equal shares.
        task_names: Names of all tasks.

    Raises:
        CtxError: The text is malformed, a task is unknown or repeated in a stage, or a stage lacks a task of the
            previous one: the paper trains a new task together with all earlier ones.
    """
    location = f"schedule={text}"
    hint = (
        "write task:steps, ...; task:steps, ...: a semicolon between stages, each with the tasks of the previous one."
    )
    stages: list[dict[str, int]] = []
    for stage_text in text.split(";"):
        stage: dict[str, int] = {}
        for entry in stage_text.split(","):
            name, _, steps = (field.strip() for field in entry.partition(":"))
            if name not in task_names:
                raise CtxError(
                    f"There is no task {name!r}.", location=location, hint=f"use some of: {', '.join(task_names)}."
                )
            if name in stage or not (steps or "1").isdecimal() or int(steps or 1) < 1:
                raise CtxError(f"{entry.strip()!r} is repeated, or has no number of steps.", location=text, hint=hint)
            stage[name] = int(steps or 1)
        if stages and (missing := [name for name in stages[-1] if name not in stage]):
            raise CtxError(
                f"Stage {len(stages) + 1} lacks the earlier task {missing[0]!r}.", location=location, hint=hint
            )
        stages.append(stage)
    return stages
