"""Units of a sequence, and what is cut of spans to fit a number of tokens."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.objectives.spans import Units, harmonic, sample_spans, trim_to_budget


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=40), gaps=st.lists(st.booleans(), min_size=1, max_size=40)
)
def test_units_are_words_that_no_other_token_interrupts(lengths, gaps):
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
def test_the_budget_is_met_exactly_and_words_are_broken_only_when_none_fits(lengths, share, context, seed):
    rng = np.random.default_rng(seed)
    units = Units.of(np.ones(sum(lengths), dtype=bool), np.repeat(np.arange(len(lengths)), lengths))
    budget = round(share * sum(lengths))
    chosen = trim_to_budget(sample_spans(len(units), harmonic(5), context, rng), units, budget, rng)
    assert len(chosen) == budget
    assert (np.diff(chosen) > 0).all()
    taken = np.isin(units.positions, chosen)
    of_word = [taken[start:stop] for start, stop in pairwise(units.bounds)]
    whole = [len(word) for word in of_word if word.all()]
    loose = [len(word) for word in of_word if not word.all()]
    if any(word.any() and not word.all() for word in of_word):
        assert min(loose) > budget - sum(whole), "a whole word would have fitted"
