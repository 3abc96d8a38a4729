"""Sampling of spans of words or tokens in a sequence, to be predicted, masked or removed.

A sequence's candidate tokens are grouped into `Units`. `sample_spans` spaces spans evenly (XLNet), `place_spans` places
them anywhere within a budget of tokens (ALBERT's n-grams), and `anchored_spans` selects exactly `budget` tokens in
spans that may overlap (SpanBERT).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Units:
    """The candidates of a sequence, grouped into units that are selected as a whole: words, or single tokens.

    Attributes:
        positions: (candidates,) positions in the sequence, ascending.
        bounds: (units + 1,) unit u is `positions[bounds[u]:bounds[u + 1]]`.
    """

    positions: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, candidates: np.ndarray, word_ids: np.ndarray | None = None) -> Self:
        """Units of the (tokens,) bool candidates; neighbors with the same word id form a word, and without word ids
        every token is a unit."""
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
        positions = (self.positions[self.bounds[start] : self.bounds[stop]] for start, stop in spans.tolist())
        return np.concatenate([self.positions[:0], *positions])

    def tokens(self, selected: np.ndarray) -> np.ndarray:
        """Positions of all tokens of the selected units, as indices or a mask."""
        is_selected = np.zeros(len(self), dtype=bool)
        is_selected[selected] = True
        return self.positions[np.repeat(is_selected, self.lengths)]


def harmonic(longest: int) -> np.ndarray:
    """Probabilities of the span lengths 1 ... `longest`, p(n) proportional to 1/n, as in ALBERT and XLNet."""
    weights = 1 / np.arange(1, longest + 1)
    return weights / weights.sum()


def geometric(probability: float, longest: int) -> np.ndarray:
    """Probabilities of the span lengths 1 ... `longest`, geometric and truncated there, as in SpanBERT."""
    weights = probability * (1 - probability) ** np.arange(longest)
    return weights / weights.sum()


def sample_spans(units: int, length_probabilities: np.ndarray, context: float, rng: np.random.Generator) -> np.ndarray:
    """Disjoint spans, each at a random position in its own context; the contexts are adjacent.

    A span of n units has a context of `context * n` units, so that about one unit in `context` is in a span for any
    lengths (Yang et al. 2019, section 3.1). The end of the sequence truncates the last context and possibly its span.

    Returns (spans, 2) first unit and the one after the last, ascending; possibly none.
    """
    max_contexts = int(units // context) + 1  # for spans of one unit
    lengths = 1 + rng.choice(len(length_probabilities), size=max_contexts, p=length_probabilities)
    contexts = np.round(lengths * context).astype(np.int64)
    starts = np.cumsum(contexts) - contexts + rng.integers(contexts - lengths + 1)
    spans = np.stack([starts, np.minimum(starts + lengths, units)], axis=1)
    return spans[starts < units]


def place_spans(units: Units, lengths: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Disjoint spans that start at random units, within a budget of tokens (Lan et al. 2019, section 4.1).

    A span ends early at the budget, at an earlier span or at a gap between the candidates (a special token); a unit
    over the budget is skipped. If no unit fits, the shortest one is selected. `lengths` are the (units,) lengths in
    units of the span that begins at each. Returns (spans, 2) in the order of placement; none without candidates.

    Example:
        Spans of two words start at the words 2, 0 and 1, in this random order. The first one ends after word 2, the
        last word; the budget has one more token, too few for word 0 but enough for word 1.

        >>> units = Units.of(np.ones(6, bool), np.array([0, 0, 1, 2, 2, 2]))  # words of 2, 1 and 3 tokens
        >>> place_spans(units, np.array([2, 2, 2]), 4, np.random.default_rng(0)).tolist()
        [[2, 3], [1, 2]]
    """
    if not len(units):
        return np.empty((0, 2), dtype=np.int64)
    order, sizes = rng.permutation(len(units)), units.lengths
    free = np.ones(len(units), dtype=bool)
    continues = np.append(np.diff(units.positions)[units.bounds[1:-1] - 1] == 1, False)  # no gap after the unit
    spans: list[tuple[int, int]] = []
    remaining = budget
    for first, length in zip(order.tolist(), lengths[order].tolist()):
        stop = first
        while stop < first + length and free[stop] and sizes[stop] <= remaining:
            free[stop] = False
            remaining -= int(sizes[stop])
            stop += 1
            if not continues[stop - 1]:
                break
        if stop > first:
            spans.append((first, stop))
        if remaining == 0:
            break
    if not spans:
        shortest = int(order[np.argmin(sizes[order])])
        spans = [(shortest, shortest + 1)]
    return np.array(spans, dtype=np.int64)


def trim_to_budget(spans: np.ndarray, units: Units, budget: int, rng: np.random.Generator) -> np.ndarray:
    """(budget,) positions of tokens, ascending: the units of spans in random order that fit, then other units, then
    single tokens; the budget is at most the tokens of all units.

    Example:
        The span contains the words 0 and 1, which have three tokens. Word 2 exceeds the budget, so that one of its
        tokens is selected at random.

        >>> units = Units.of(np.ones(6, bool), np.array([0, 0, 1, 2, 2, 2]))  # words of 2, 1 and 3 tokens
        >>> trim_to_budget(np.array([[0, 2]]), units, 4, np.random.default_rng(4)).tolist()
        [0, 1, 2, 5]
    """
    in_spans = [np.arange(start, stop) for start, stop in rng.permutation(spans).tolist()]
    order = np.concatenate([*in_spans, rng.permutation(len(units))]).astype(np.int64)
    selected: set[int] = set()
    remaining, lengths = budget, units.lengths
    for unit, length in zip(order.tolist(), lengths[order].tolist()):
        if length <= remaining and unit not in selected:
            selected.add(unit)
            remaining -= length
        if remaining == 0:
            break
    positions = units.tokens(np.fromiter(selected, dtype=np.int64))
    if remaining:
        unselected = np.setdiff1d(units.positions, positions, assume_unique=True)
        positions = np.concatenate([positions, rng.choice(unselected, remaining, replace=False)])
    return np.sort(positions)


def anchored_spans(units: Units, length_probabilities: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Spans that begin with the unit of a random token, until `budget` tokens are selected (Joshi et al. 2020, section
    3.1, and the released data preparation).

    A span's length in units and its anchor, uniform over the tokens, are sampled together, and resampled if the anchor
    is already selected. A span may overlap earlier ones, whose tokens are not counted again, and ends at a gap between
    the candidates (a special token). The last one ends with the budget, possibly within a unit. Returns (budget,)
    positions of the tokens, ascending.

    Example:
        All spans have two words. The first anchor, token 5, is in word 2, the last word, so the span has its three
        tokens; the second anchor is token 0, and the budget ends the span after it.

        >>> units = Units.of(np.ones(6, bool), np.array([0, 0, 1, 2, 2, 2]))  # words of 2, 1 and 3 tokens
        >>> anchored_spans(units, np.array([0, 1]), 4, np.random.default_rng(5)).tolist()
        [0, 3, 4, 5]
    """
    bounds, tokens = units.bounds.tolist(), len(units.positions)
    ends = np.append(np.flatnonzero(np.diff(units.positions) != 1) + 1, tokens)  # of the runs of candidates
    selected = np.zeros(tokens, dtype=bool)
    remaining = budget
    while remaining:
        lengths = 1 + rng.choice(len(length_probabilities), size=remaining, p=length_probabilities)
        anchors = rng.integers(tokens, size=remaining)
        first = np.searchsorted(units.bounds, anchors, side="right") - 1
        run_ends = ends[np.searchsorted(ends, anchors, side="right")]
        for anchor, unit, length, end in zip(anchors.tolist(), first.tolist(), lengths.tolist(), run_ends.tolist()):
            if selected[anchor]:
                continue
            begin, stop = bounds[unit], min(bounds[min(unit + length, len(units))], end)
            free = begin + np.flatnonzero(~selected[begin:stop])[:remaining]
            selected[free] = True
            remaining -= len(free)
            if not remaining:
                break
    return units.positions[selected]
