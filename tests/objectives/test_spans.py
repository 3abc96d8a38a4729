"""The span sampler: where spans may lie, how many there are, and what is cut to fit a number of tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ctxmodels.objectives.spans import Units, harmonic, place_spans, sample_spans, trim_to_budget

SEEDS = st.integers(0, 10**6)


@settings(deadline=None)
@given(units=st.integers(0, 200), longest=st.integers(1, 10), context=st.floats(1, 12), seed=SEEDS)
def test_spans_are_disjoint_ascending_and_no_longer_than_asked(units, longest, context, seed):
    spans = sample_spans(units, harmonic(longest), context, np.random.default_rng(seed))
    assert spans.shape[1] == 2
    assert (spans[:, 0] < spans[:, 1]).all()
    assert (spans[:, 1] - spans[:, 0] <= longest).all()
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    assert not len(spans) or (spans[0, 0] >= 0 and spans[-1, 1] <= units)


def test_context_one_takes_everything():
    spans = sample_spans(40, harmonic(4), 1.0, np.random.default_rng(0))
    assert np.concatenate([np.arange(*span) for span in spans]).tolist() == list(range(40))


@pytest.mark.parametrize("context", [3.0, 6.0, 6.5])
def test_one_unit_in_context_is_in_a_span_and_lengths_are_drawn_as_asked(context):
    spans = [sample_spans(512, harmonic(5), context, np.random.default_rng(seed)) for seed in range(600)]
    lengths = np.concatenate([of_row[:-1, 1] - of_row[:-1, 0] for of_row in spans])  # the last one may be cut
    share = sum(int((of_row[:, 1] - of_row[:, 0]).sum()) for of_row in spans) / (512 * len(spans))
    assert share == pytest.approx(1 / context, rel=0.02)
    counts = np.bincount(lengths, minlength=6)[1:] / len(lengths)
    assert counts == pytest.approx(harmonic(5), abs=0.03)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    gaps=st.lists(st.booleans(), min_size=1, max_size=40),
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
    assert all(words[left] != words[right] or right > left + 1 for left, right in borders), (
        "units are as long as can be"
    )
    assert len(Units.of(candidates)) == candidates.sum()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    share=st.floats(0, 1),
    context=st.floats(1, 8),
    seed=SEEDS,
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


@settings(deadline=None)
@given(
    candidates=st.lists(st.booleans(), max_size=40),
    words=st.lists(st.integers(0, 3), min_size=40, max_size=40),
    longest=st.integers(1, 5),
    budget=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_placed_spans_are_disjoint_runs_of_the_row_within_the_budget(candidates, words, longest, budget, seed):
    row = np.array(candidates, dtype=bool)
    units, rng = Units.of(row, np.array(words[: len(row)])), np.random.default_rng(seed)
    lengths = rng.integers(1, longest, len(units), endpoint=True)
    spans = place_spans(units, lengths, budget, rng)
    positions = units.in_spans(spans)
    assert len(set(positions.tolist())) == len(positions)
    assert row[positions].all()
    for start, stop in spans.tolist():
        assert stop - start <= lengths[start]
        assert (np.diff(units.in_spans(np.array([[start, stop]]))) == 1).all(), "no special token inside"
    if len(units) and units.lengths.min() <= budget:
        assert 0 < len(positions) <= budget
    else:
        assert len(spans) == (len(units) > 0)
