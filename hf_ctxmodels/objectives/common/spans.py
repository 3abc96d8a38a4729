"""Sampling of spans of words or tokens in a row, to be predicted, masked or removed.

A row's candidate tokens are grouped into `Units`; a sampler returns spans over the units as (spans, 2) arrays, the
first unit and the one after the last; `Units.in_spans` converts them to token positions. `sample_spans` spaces spans
evenly (XLNet); `place_spans` places them anywhere within a budget of tokens (ALBERT's n-grams). `anchored_spans` spends
a budget of tokens exactly, on spans that may overlap (SpanBERT), and returns token positions itself.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Units:
    """The candidates of a row, grouped into units that are selected as a whole: words, or single tokens.

    Attributes:
        positions: (candidates,) positions in the row, ascending.
        bounds: (units + 1,) unit u is `positions[bounds[u]:bounds[u + 1]]`.
    """

    positions: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, candidates: np.ndarray, word_ids: np.ndarray | None = None) -> Self:
        """Units of a row.

        Args:
            candidates: (tokens,) bool, True where a token may be selected.
            word_ids: (tokens,) neighbours with the same id form a word; None makes every token a unit.
        """
        positions = np.flatnonzero(candidates)
        if word_ids is None:
            return cls(positions, np.arange(len(positions) + 1))
        words = word_ids[positions]
        inner = np.flatnonzero((np.diff(words) != 0) | (np.diff(positions) != 1)) + 1
        return cls(positions, np.concatenate([[0], inner, [len(positions)]]) if len(positions) else np.zeros(1, int))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(units,) number of tokens of each."""
        return np.diff(self.bounds)

    def in_spans(self, spans: np.ndarray) -> np.ndarray:
        """Positions of the tokens of (spans, 2) disjoint spans, in the order of the spans."""
        parts = (self.positions[self.bounds[start] : self.bounds[stop]] for start, stop in spans.tolist())
        return np.concatenate([self.positions[:0], *parts])

    def tokens(self, chosen: np.ndarray) -> np.ndarray:
        """Positions of all tokens of the chosen units, given by number or as a mask."""
        marked = np.zeros(len(self), dtype=bool)
        marked[chosen] = True
        return self.positions[np.repeat(marked, self.lengths)]


def harmonic(longest: int) -> np.ndarray:
    """Probabilities of the span lengths 1 ... `longest`, p(n) proportional to 1/n, as ALBERT and XLNet draw them."""
    weights = 1 / np.arange(1, longest + 1)
    return weights / weights.sum()


def geometric(probability: float, longest: int) -> np.ndarray:
    """Probabilities of the span lengths 1 ... `longest`, geometric and cut there, as SpanBERT draws them."""
    weights = probability * (1 - probability) ** np.arange(longest)
    return weights / weights.sum()


def sample_spans(units: int, length_probabilities: np.ndarray, context: float, rng: np.random.Generator) -> np.ndarray:
    """Disjoint spans, each at a random place in a context of its own; the contexts are adjacent.

    A span of n units has a context of `context * n` units, so that about one unit in `context` is in a span whatever
    the lengths (Yang et al. 2019, section 3.1). The row's end cuts the last context and possibly its span.

    Args:
        units: Number of units in the row.
        length_probabilities: Probabilities of the span lengths 1, 2, ... in units.
        context: Units of text for each unit in a span, at least 1.
        rng: The row's generator.

    Returns:
        (spans, 2) first unit and the one after the last, ascending; possibly none.
    """
    most = int(units // context) + 1  # maximum number of contexts, for spans of one unit
    lengths = 1 + rng.choice(len(length_probabilities), size=most, p=length_probabilities)
    contexts = np.round(lengths * context).astype(np.int64)
    starts = np.cumsum(contexts) - contexts + rng.integers(contexts - lengths + 1)
    spans = np.stack([starts, np.minimum(starts + lengths, units)], axis=1)
    return spans[starts < units]


def place_spans(units: Units, lengths: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Disjoint spans that start at random units, within a budget of tokens (Lan et al. 2019, section 4.1).

    A span ends early at the budget, at an earlier span or at a gap between the candidates (a special token); a unit
    over the budget is skipped. If no unit fits, the first drawn of the shortest ones is taken: a row without a span
    would be worse than a row over its budget.

    Args:
        units: The row's units.
        lengths: (units,) length in units of the span that begins at each.
        budget: Number of tokens.
        rng: The row's generator.

    Returns:
        (spans, 2) in the order of placement; none for a row without candidates.
    """
    if not len(units):
        return np.empty((0, 2), dtype=np.int64)
    order, sizes = rng.permutation(len(units)), units.lengths
    free = np.ones(len(units), dtype=bool)
    goes_on = np.append(np.diff(units.positions)[units.bounds[1:-1] - 1] == 1, False)  # no gap after the unit
    spans: list[tuple[int, int]] = []
    left = budget
    for first, length in zip(order.tolist(), lengths[order].tolist()):
        stop = first
        while stop < first + length and free[stop] and sizes[stop] <= left:
            free[stop] = False
            left -= int(sizes[stop])
            stop += 1
            if not goes_on[stop - 1]:
                break
        if stop > first:
            spans.append((first, stop))
        if left == 0:
            break
    if not spans:
        shortest = int(order[np.argmin(sizes[order])])
        spans = [(shortest, shortest + 1)]
    return np.array(spans, dtype=np.int64)


def trim_to_budget(spans: np.ndarray, units: Units, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Exactly `budget` tokens: the units of spans in random order that fit, then other units, then single tokens.

    Args:
        spans: (spans, 2) units, from `sample_spans`.
        units: The row's units.
        budget: Number of tokens, at most those of all units.
        rng: The row's generator.

    Returns:
        (budget,) positions of the tokens, ascending.
    """
    in_spans = [np.arange(start, stop) for start, stop in rng.permutation(spans).tolist()]
    order = np.concatenate([*in_spans, rng.permutation(len(units))]).astype(np.int64)
    chosen: set[int] = set()
    left, lengths = budget, units.lengths
    for unit, length in zip(order.tolist(), lengths[order].tolist()):
        if length <= left and unit not in chosen:
            chosen.add(unit)
            left -= length
        if left == 0:
            break
    positions = units.tokens(np.fromiter(chosen, dtype=np.int64))
    if left:
        others = np.setdiff1d(units.positions, positions, assume_unique=True)
        positions = np.concatenate([positions, rng.choice(others, left, replace=False)])
    return np.sort(positions)


def anchored_spans(units: Units, length_probabilities: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Spans that begin with the unit of a random token, until a budget of tokens is spent (Joshi et al. 2020, section
    3.1, and the released data preparation).

    A span's length in units and its anchor, uniform over the tokens, are drawn together, and again if the anchor is
    selected already. A span may run over earlier ones, whose tokens cost nothing, and ends at a gap between the
    candidates (a special token). The last one ends where the budget does, possibly within a unit.

    Args:
        units: The row's units.
        length_probabilities: Probabilities of the span lengths 1, 2, ... in units.
        budget: Number of tokens, at most those of all units.
        rng: The row's generator.

    Returns:
        (budget,) positions of the tokens, ascending; spans that overlap or touch are one run of them.
    """
    bounds, tokens = units.bounds.tolist(), len(units.positions)
    ends = np.append(np.flatnonzero(np.diff(units.positions) != 1) + 1, tokens)  # of the runs of candidates
    selected = np.zeros(tokens, dtype=bool)
    left = budget
    while left:
        lengths = 1 + rng.choice(len(length_probabilities), size=left, p=length_probabilities)
        anchors = rng.integers(tokens, size=left)
        first = np.searchsorted(units.bounds, anchors, side="right") - 1
        run_ends = ends[np.searchsorted(ends, anchors, side="right")]
        for anchor, unit, length, end in zip(anchors.tolist(), first.tolist(), lengths.tolist(), run_ends.tolist()):
            if selected[anchor]:
                continue
            begin, stop = bounds[unit], min(bounds[min(unit + length, len(units))], end)
            free = begin + np.flatnonzero(~selected[begin:stop])[:left]
            selected[free] = True
            left -= len(free)
            if not left:
                break
    return units.positions[selected]
