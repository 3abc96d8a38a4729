"""Structure-aware tasks (Sun et al. 2020, section 4.2.2)."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import factorial

import numpy as np

from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument, sentence_chunks
from hf_ctxmodels.objectives.multitask.task import STRUCTURE, DocumentTask, TaskRow

NEIGHBOURS, SAME_DOCUMENT, OTHER_DOCUMENT = 0, 1, 2
"""Classes of `SentenceDistance`."""


def _sentence(document: TokenizedDocument, number: int) -> np.ndarray:
    return document.ids[document.bounds[number] : document.bounds[number + 1]]


def _shortened(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Two sentences without their ends, the longer one's first, so that they fit into a row."""
    half = room // 2
    return first[: max(half, room - len(second))], second[: max(room - half, room - len(first))]


class SentenceReordering(DocumentTask):
    """Predict by which permutation the segments of a text were reordered.

    The text is as many sentences as fit. It is split at random into n segments of whole sentences, n uniform in 1 to m,
    but at most the number of sentences, and they get a random order. The classes are the 1! + 2! + ... + m!
    permutations: first those of one segment, then of two, and so on, in lexicographic order. A permutation has the
    numbers of the segments in the order of the row.

    Args:
        rooms: See `DocumentTask`.
        most: m.
    """

    name = "sentence_reordering"
    kind = STRUCTURE

    def __init__(self, rooms: tuple[int, int], most: int) -> None:
        super().__init__(rooms)
        self.orders = [order for number in range(1, most + 1) for order in permutations(range(number))]
        self.most, self.classes = most, len(self.orders)

    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """See `DocumentTask.rows`."""
        for first, last in sentence_chunks(document.bounds, self.room, from_end=rng.random() < 0.5):
            number = int(rng.integers(1, min(self.most, last - first), endpoint=True))
            inner = np.sort(first + 1 + rng.choice(last - first - 1, number - 1, replace=False))
            edges = document.bounds[[first, *inner, last]]
            before = sum(factorial(each) for each in range(1, number))
            chosen = before + int(rng.integers(factorial(number)))
            parts = [document.ids[edges[each] : edges[each + 1]] for each in self.orders[chosen]]
            yield TaskRow((np.concatenate(parts),), target=chosen)


class SentenceDistance(DocumentTask):
    """Predict whether two sentences are neighbours (0), others of the same document (1), or of two documents (2).

    Every sentence is the first of a pair, of a class drawn uniformly among those that are possible. Neighbours are in
    the order of the text. Sentences that do not fit lose their ends.
    """

    name = "sentence_distance"
    kind = STRUCTURE
    classes = 3

    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """See `DocumentTask.rows`."""
        count = len(document)
        for number in range(count):
            before, after = max(0, number - 1), max(0, count - number - 2)  # sentences that are no neighbours
            possible = [number + 1 < count, before + after > 0, bool(others)]
            if not any(possible):
                continue
            target = int(rng.choice(np.flatnonzero(possible)))
            if target == NEIGHBOURS:
                second = _sentence(document, number + 1)
            elif target == SAME_DOCUMENT:
                drawn = int(rng.integers(before + after))
                second = _sentence(document, drawn if drawn < before else drawn - before + number + 2)
            else:
                other = others[int(rng.integers(len(others)))]
                second = _sentence(other, int(rng.integers(len(other))))
            yield TaskRow(_shortened(_sentence(document, number), second, self.pair_room), target=target)
