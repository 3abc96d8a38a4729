"""Units of a sequence, and trimming of spans to a number of tokens."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.objectives.spans import Units, harmonic, sample_spans, trim_to_budget


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=40), gaps=st.lists(st.booleans(), min_size=1, max_size=40)
)
def test_units_are_contiguous_words(lengths, gaps):
    words = np.repeat(np.arange(len(lengths)), lengths)
    candidates = np.resize(gaps, len(words))
    units = Units.of(candidates, words)
    assert units.positions.tolist() == np.flatnonzero(candidates).tolist()
    pieces = [units.tokens(np.array([number])).tolist() for number in range(len(units))]
    assert [position for piece in pieces for position in piece] == units.positions.tolist()
    for piece in pieces:
        assert len({words[position] for position in piece}) == 1
        assert piece == list(range(piece[0], piece[-1] + 1))
    borders = [(left[-1], right[0]) for left, right in pairwise(pieces)]
    assert all(words[left] != words[right] or right > left + 1 for left, right in borders), "units are maximal"
    assert len(Units.of(candidates)) == candidates.sum()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    share=st.floats(0, 1),
    context=st.floats(1, 8),
    seed=st.integers(0, 10**6),
)
def test_trimming_meets_budget_exactly(lengths, share, context, seed):
    rng = np.random.default_rng(seed)
    units = Units.of(np.ones(sum(lengths), dtype=bool), np.repeat(np.arange(len(lengths)), lengths))
    budget = round(share * sum(lengths))
    chosen = trim_to_budget(sample_spans(len(units), harmonic(5), context, rng), units, budget, rng)
    assert len(chosen) == budget
    assert (np.diff(chosen) > 0).all()
    is_chosen = np.isin(units.positions, chosen)
    words = [is_chosen[start:stop] for start, stop in pairwise(units.bounds)]
    full_lengths = [len(word) for word in words if word.all()]
    other_lengths = [len(word) for word in words if not word.all()]
    if any(word.any() and not word.all() for word in words):
        assert min(other_lengths) > budget - sum(full_lengths), "another word would have fit"
